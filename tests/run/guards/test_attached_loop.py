"""What a loop does that attach can't see in its arguments."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable

import pytest
import torch

from ray_adascale import AdaScaleConfig, EarlyStop, attach
from ray_adascale.integrations.client import follow_batch

from ...integrations.problem import BATCH, dataset, loss_of, make, settings


def test_settings_of_a_run_alone_are_warned_of() -> None:
    unused = {
        "evaluate_every": 5.0,
        "shuffle": False,
        "early_stop": EarlyStop(patience=3.0),
    }
    with pytest.warns(UserWarning, match="has no effect here") as caught:
        attach(*make(10), settings(10, per_worker_batch_size=BATCH, seed=3, **unused))
    (warned,) = caught
    text = str(warned.message)
    assert all(f"{name}=" in text for name in unused)
    assert "seed" not in text


def test_the_state_of_a_run_without_adascale_is_refused() -> None:
    model, optimizer, scheduler = make(10)
    loss_of(model, dataset(BATCH).tensors).backward()
    optimizer.step()
    plain = copy.deepcopy(optimizer.state_dict())
    model, optimizer, scheduler = make(10)
    adascale, _ = attach(model, optimizer, scheduler, settings(10))
    with pytest.raises(
        ValueError,
        match=r"run without AdaScale, .*no effective steps.*attach\(\.\.\., starting_step=k\)",
    ):
        adascale.load_state_dict(plain)
    with pytest.raises(ValueError, match="state of the optimizer inside"):
        adascale.load_state_dict(adascale.wrapped.state_dict())
    own = adascale.state_dict()
    attach(*make(10), settings(10))[0].load_state_dict(own)
    # torch.distributed.checkpoint keeps the numbers in the groups alone
    del own["adascale"]
    attach(*make(10), settings(10))[0].load_state_dict(own)


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_are_counted_anew_in_each_step_whether_gradients_are_zeroed_or_not(
    passes: int,
) -> None:
    model, optimizer, scheduler = make(40)
    config = settings(40, per_worker_batch_size=BATCH)
    adascale, _ = attach(model, optimizer, scheduler, config)
    x = dataset(BATCH).tensors
    for _ in range(3):  # gradients of the steps before stay
        loss_of(model, x).backward()
        adascale.step()
    adascale.zero_grad()
    for _ in range(passes):
        loss_of(model, x).backward()
    if passes == 1:
        adascale.step()
        return
    with pytest.raises(RuntimeError, match="This step has 2 backward passes"):
        adascale.step()


@pytest.mark.parametrize("clips", [False, True])
def test_a_declared_clipping_that_the_loop_leaves_out_is_warned_of_once(
    clips: bool,
) -> None:
    model, optimizer, scheduler = make(40)
    config = settings(40, per_worker_batch_size=BATCH, grad_clip=0.01)
    adascale, _ = attach(model, optimizer, scheduler, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            adascale.zero_grad()
            loss_of(model, dataset(BATCH).tensors).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            adascale.step()
    assert len(caught) == (not clips)
    if not clips:
        assert "clips nothing" in str(caught[0].message)
        assert "clip_grad_norm_(model.parameters(), 0.01)" in str(caught[0].message)


Arranged = tuple[tuple[object, ...], dict[str, object]]


class AnyInputs(torch.nn.Module):
    """A model that takes any inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, *inputs: object, **named: object) -> torch.Tensor:
        return self.weight.sum()


def sizes_warned_of(
    *shapes: tuple[int, ...],
    steps: int = 12,
    arrange: Callable[[torch.Tensor], Arranged],
    training: bool = True,
    examples: int = BATCH,
    calls: int = 1,
    compiled: bool = False,
) -> list[str]:
    """The warnings of a loop.

    Args:
        shapes: Those of the inputs, in turn.
        steps: Optimizer steps.
        arrange: Makes the model's arguments of an input.
        training: Whether the model is in training mode.
        examples: Of a pass, by the settings.
        calls: Of the model, in a step of one pass.
        compiled: Whether the loop calls a compiled model.
    """
    model = AnyInputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(
        base_batch_size=examples, total_steps=40, per_worker_batch_size=examples
    )
    adascale, _ = attach(model, optimizer, None, config)
    model.train(training)
    called = (
        torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(steps):
            inputs, named = arrange(torch.zeros(shapes[i % len(shapes)]))
            sum(called(*inputs, **named) for _ in range(calls)).backward()
            adascale.step()
            adascale.zero_grad()
    if steps >= 10:
        assert not model._forward_pre_hooks
    return [str(each.message) for each in caught]


def alone(x: torch.Tensor) -> Arranged:
    return (x,), {}


@pytest.mark.parametrize(
    "arrange",
    [
        alone,
        lambda x: ((), {"input_ids": x, "labels": x[:, 0]}),
        lambda x: ((x, x, 3), {"flag": None}),
        lambda x: (({"a": {"b": x}},), {}),
    ],
    ids=["tensor", "named", "several", "dict"],
)
def test_micro_batches_of_another_size_than_the_settings_say_are_warned_of_once(
    arrange: Callable[[torch.Tensor], Arranged],
) -> None:
    (found,) = sizes_warned_of((8, 6), steps=30, arrange=arrange)
    assert "gets 8 examples in a pass, and the settings say 4" in found
    assert "per_worker_batch_size=8" in found
    # the last batch of an epoch is smaller
    assert len(sizes_warned_of(*[(8, 6)] * 9, (5, 6), arrange=arrange)) == 1
    assert sizes_warned_of((8, 6), steps=9, arrange=arrange) == []
    assert sizes_warned_of((8, 6), arrange=arrange, training=False) == []


@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 6)],
        [(7, 4, 2)],  # sequences first
        [(1, 6)],  # packed into one row
        [(9,), (12,), (15,)],  # nodes of graphs
        [()],
        [(8, 3), (4, 3)],  # one pass with the size of the settings is enough
    ],
)
def test_inputs_that_may_have_the_settings_examples_are_not_warned_of(
    shapes: list[tuple[int, ...]],
) -> None:
    assert sizes_warned_of(*shapes, arrange=alone) == []


def test_what_is_no_batch_in_one_tensor_is_not_warned_of() -> None:
    # images of several sizes, and their boxes, as torchvision's detectors get them
    detection = sizes_warned_of(
        (3, 9, 9), arrange=lambda x: (([x] * 4, [{"boxes": x[0]}] * 4), {})
    )
    nested = sizes_warned_of(
        (3, 9), arrange=lambda x: ((torch.nested.nested_tensor([x, x]),), {})
    )
    nested = [text for text in nested if "examples" in text]  # torch has a warning
    in_tokens = sizes_warned_of((8, 16), arrange=alone, examples=128)
    without_a_batch = sizes_warned_of((9,), arrange=alone, examples=1)
    in_chunks = sizes_warned_of((2, 6), arrange=alone, calls=2)
    compiled = sizes_warned_of((8, 6), arrange=alone, compiled=True)
    assert [detection, nested, in_tokens, without_a_batch, in_chunks, compiled] == [
        []
    ] * 6


def test_the_size_of_a_pass_may_change_after_attach() -> None:
    """Clients call it with the settings, and follow the loader later."""
    model, optimizer, scheduler = make(40)
    config = settings(40, per_worker_batch_size=2 * BATCH, accumulation=2)
    adascale, schedule = attach(model, optimizer, scheduler, config)
    follow_batch(schedule, passes=2, per_worker_batch_size=BATCH)
    batches = torch.utils.data.DataLoader(dataset(24 * BATCH), batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, batch in enumerate(batches):
            (loss_of(model, batch) / 2).backward()
            if i % 2:
                adascale.step()
                adascale.zero_grad()
    assert adascale.steps == 12


def test_a_model_is_saved_copied_and_scripted_while_its_inputs_are_looked_at() -> None:
    model, optimizer, scheduler = make(40)
    attach(model, optimizer, scheduler, settings(40, per_worker_batch_size=2 * BATCH))
    x = dataset(BATCH).tensors[0]
    kept = io.BytesIO()
    torch.save(copy.deepcopy(model), kept)
    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    assert torch.equal(model(x), loaded(x))
    for _ in range(1001):  # no step of AdaScale comes
        loaded(x)
    assert not loaded._forward_pre_hooks
    assert model._forward_pre_hooks

    model, optimizer, scheduler = make(40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(model)
    attach(scripted, optimizer, scheduler, settings(40))
