"""Lines that ordinary training loops contain: each does what it does without this
package, or raises an error that helps.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScale,
    AdaScaleConfig,
    EffectiveAverage,
    LocalBackend,
    OptimizerChain,
    PerWorker,
    Run,
    attach,
)
from ray_adascale._torch import is_dtensor
from ray_adascale.data.order import epoch_order
from ray_adascale.optim.tau_schedule import TauSchedule
from ray_adascale.run.boundary import checkpointing
from ray_adascale.run.observe.trace import read_trace

from ..samples_of import Merging, WaitingBackend

STEPS, BATCH = 12, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * STEPS, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def transfer_model() -> nn.Sequential:
    """A frozen backbone with batch norm and dropout, and a head."""
    torch.manual_seed(1)
    backbone = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)
    )
    return nn.Sequential(backbone.requires_grad_(False), nn.Linear(8, 2))


def make_run(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: bool = False,
    **settings: Any,
) -> Run:
    if optimizer is None:
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if scheduler else None
    extra = {
        key: settings.pop(key)
        for key in ("evaluate", "backend", "starting_step")
        if key in settings
    }
    defaults = {
        "base_batch_size": BATCH,
        "total_steps": STEPS,
        "scheduler_unit": "step" if scheduler else None,
    }
    return Run(
        model,
        optimizer,
        schedule,
        data(),
        AdaScaleConfig(**(defaults | settings)),
        **extra,
    )


def plain_loop(model: nn.Module) -> nn.Module:
    """The loop of a script at the base batch, over the examples in the order of the
    run.
    """
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    x, y = data().tensors
    for indices in epoch_order(len(x), seed=0, epoch=0).reshape(STEPS, BATCH).tolist():
        F.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_loop_over_ones_own_loader_is_told_of_the_run() -> None:
    x, y = data().tensors
    run = make_run(nn.Linear(6, 2))

    def steps(count: int) -> None:
        for i in range(0, count * BATCH, BATCH):
            run.optimizer.zero_grad()
            F.cross_entropy(run.model(x[i : i + BATCH]), y[i : i + BATCH]).backward()
            run.optimizer.step()

    steps(4)
    with pytest.warns(
        UserWarning,
        match=r"has run 5 times, and no loop over the run.*Loop over the run, not over a loader",
    ):
        steps(2)
    drive(run)


def drive(run: Run, in_loop: Callable[[Run], object] = lambda run: None) -> None:
    for x, y in run:
        in_loop(run)
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(
            one.state_dict().values(), other.state_dict().values(), strict=True
        )
    )


# ---- modes of modules ----------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the loop", "in the loop"])
def test_a_frozen_backbone_stays_in_eval_mode(when: str) -> None:
    model, expected = transfer_model(), transfer_model()
    statistics = model[0][1].running_mean.clone()
    if when == "before the loop":
        model[0].eval()
    run = make_run(
        model,
        evaluate=lambda net: {"modes": float(net[0].training or net[1].training)},
        evaluate_every=3,
    )
    seen = []

    def in_loop(run: Run) -> None:
        if when == "in the loop" and not seen:
            run.module[0].eval()
        seen.append([part.training for part in model.modules()])

    drive(run, in_loop)
    expected[0].eval()
    assert same_weights(model, plain_loop(expected))
    assert torch.equal(model[0][1].running_mean, statistics)
    assert run.summary()["modes"] == 0  # evaluated in eval mode
    assert all(
        modes == [True, False, False, False, False, False, True] for modes in seen[1:]
    )


def lora_model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Merging(6, 8), nn.ReLU(), Merging(8, 2), nn.Dropout(0.5))


def test_a_model_whose_train_method_does_work_trains_as_in_a_plain_loop() -> None:
    model, expected = lora_model(), lora_model()
    # a mode of its own, which the restored mode of the root must not change
    model[3].eval()
    expected[3].eval()
    run = make_run(
        model,
        evaluate=lambda net: {"merged": float(net[0].merged and net[2].merged)},
        evaluate_every=100,
    )
    start = [layer.weight.clone() for layer in (model[0], model[2])]
    seen = []
    drive(run, lambda run: seen.append([part.training for part in model]))
    # merged and taken apart, before the first step and after the last
    assert model[0].changes == model[2].changes == 4
    assert run.summary()["merged"] == 1
    assert seen == [[True, True, True, False]] * STEPS
    plain_loop(expected)
    for name in ("0.a", "0.b", "2.a", "2.b"):
        assert torch.equal(model.get_parameter(name), expected.get_parameter(name)), (
            name
        )
    for layer, weight in zip((model[0], model[2]), start, strict=True):
        # a merge and its inverse round
        torch.testing.assert_close(layer.weight, weight)


def _lora_trained(sharding: str, evaluates: bool) -> Tensor:
    """The weights of LoRA layers, with evaluations that run the model."""
    model = lora_model()[:3]
    x, y = data().tensors

    def evaluate(net: nn.Module) -> dict[str, float]:
        assert net[0].merged  # type: ignore[index]
        return {"score": F.cross_entropy(net(x), y).item()}

    size = BATCH // (dist.get_world_size() if dist.is_initialized() else 1)
    settings = {
        "per_worker_batch_size": size,
        "rule": "unscaled",
        "sharding": sharding,
        "evaluate_every": 2.5,
    }
    run = make_run(model, **settings, **({"evaluate": evaluate} if evaluates else {}))
    drive(run)
    whole = (p.full_tensor() if is_dtensor(p) else p for p in run.module.parameters())
    return torch.cat([p.detach().reshape(-1) for p in whole])


def test_what_a_train_method_writes_is_kept_under_every_sharding(pool: Any) -> None:
    """An evaluation under FSDP2 left the root's weights whole, and what train()
    wrote to those was lost: merged for good.
    """
    expected = _lora_trained("none", False)
    for sharding in ("none", "zero2", "fsdp2"):
        for found in pool(2).run(_lora_trained, sharding, True):
            torch.testing.assert_close(found, expected)


class Observer(nn.Module):
    """Scales by the largest input so far, in each mode, as observers of fake
    quantization do.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("largest", torch.ones(()))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("shape", None)

    def forward(self, x: Tensor) -> Tensor:
        largest = torch.maximum(self.largest, x.detach().abs().max())
        if self.how == "in place":
            self.largest.copy_(largest)
        else:
            self.largest = largest
        self.calls += 1
        if self.shape is None:
            self.shape = torch.tensor(x.shape)
        return x / self.largest


def observed_model(how: str) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(Observer(how), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def _observed(sharding: str, how: str, evaluates: bool) -> Tensor:
    """The weights of a run whose evaluations run the model."""
    model = observed_model(how)
    calls: list[int] = []

    def evaluate(net: nn.Module) -> dict[str, float]:
        calls.append(int(net[0].calls))  # type: ignore[index,operator]
        return {"score": float(net(100 * data().tensors[0]).sum().detach())}

    workers = dist.get_world_size() if dist.is_initialized() else 1
    settings = {"evaluate": evaluate, "evaluate_every": 100} if evaluates else {}
    run = make_run(
        model, sharding=sharding, per_worker_batch_size=BATCH // workers, **settings
    )
    drive(run)
    if evaluates:
        assert len(calls) == 2  # before the first step and after the last
        assert calls[1] == STEPS
    whole = [p.full_tensor() if is_dtensor(p) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


@pytest.mark.filterwarnings("ignore:evaluate changed the buffer")
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_the_evaluation_before_the_first_step_leaves_buffers_as_they_were(
    how: str,
) -> None:
    expected = plain_loop(observed_model(how))
    weights = torch.cat([p.detach().flatten() for p in expected.parameters()])
    for evaluates in (False, True):
        assert torch.equal(_observed("none", how, evaluates), weights)


class Rotation(nn.Module):
    """Fills a cache once, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cosines", torch.zeros(6), persistent=False)
        self.filled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.filled:
            self.cosines.copy_(torch.linspace(0, 1, 6).cos())
            self.filled = True
        return x * self.cosines


def test_a_cache_that_the_first_evaluation_has_filled_stays_filled() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(Rotation(), nn.Linear(6, 2))
    expected = plain_loop(copy.deepcopy(model))

    def evaluate(net: nn.Module) -> dict[str, float]:
        return {"score": float(net(data().tensors[0]).sum().detach())}

    drive(make_run(model, evaluate=evaluate, evaluate_every=100))
    assert same_weights(model, expected)


def test_a_cache_that_is_saved_is_put_back_with_a_warning() -> None:
    torch.manual_seed(2)
    rotation = Rotation()
    rotation.register_buffer("cosines", torch.zeros(6))
    model = nn.Sequential(rotation, nn.Linear(6, 2))

    def evaluate(net: nn.Module) -> dict[str, float]:
        return {"score": float(net(data().tensors[0]).sum().detach())}

    run = make_run(model, evaluate=evaluate, evaluate_every=100)
    with pytest.warns(
        UserWarning, match=r"changed the buffer '0\.cosines'.*persistent=False"
    ):
        next(iter(run))
    assert rotation.cosines.count_nonzero() == 0


def _observed_under_all() -> list[bool]:
    with warnings.catch_warnings():
        # each micro-batch changes the buffers
        warnings.filterwarnings("ignore", message="The forward pass changes the buffer")
        warnings.filterwarnings("ignore", message="evaluate changed the buffer")
        return [
            torch.equal(
                _observed(sharding, "in place", True),
                _observed(sharding, "in place", False),
            )
            for sharding in ("none", "oss", "zero2", "fsdp2")
        ]


def test_it_leaves_them_under_every_sharding(pool: Any) -> None:
    assert pool(2).run(_observed_under_all) == [[True] * 4] * 2


def test_a_linear_probe_trains_in_eval_mode_with_one_warning() -> None:
    model, expected = transfer_model().eval(), transfer_model().eval()
    with pytest.warns(
        UserWarning, match="All modules of the model are in eval mode"
    ) as caught:
        drive(make_run(model))
    assert len(caught) == 1
    assert same_weights(model, plain_loop(expected))


def test_an_evaluation_of_ones_own_that_leaves_eval_mode_is_warned_of() -> None:
    model = transfer_model()
    seen = []

    def in_loop(run: Run) -> None:
        seen.append(model.training)
        if len(seen) == 4:
            model.eval()

    with pytest.warns(
        UserWarning, match=r"in eval mode in step 4 .*call model\.train\(\) after it"
    ) as caught:
        drive(make_run(model), in_loop)
    assert len(caught) == 1
    assert seen == [True] * 4 + [False] * (STEPS - 4)  # as the script says


# ---- buffers -------------------------------------------------------------------------


def test_nan_that_a_skipped_step_leaves_in_a_buffer_is_told() -> None:
    model = transfer_model().requires_grad_(True)
    run = make_run(model)

    def loop() -> None:
        for step, (x, y) in enumerate(run, 1):
            run.backward(
                F.cross_entropy(run.model(x * math.nan if step in (3, 5) else x), y)
            )
            run.step()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop()
    (text,) = [
        text
        for warning in told
        if "NaN in the buffer" in (text := str(warning.message))
    ]
    assert text.startswith(
        "Step 3 was skipped, and left NaN in the buffer '0.1.running_mean' (one of 2)."
    )
    assert run.summary()["skipped_steps"] == 2


class Codebook(nn.Module):
    """A buffer that each forward pass in train mode moves, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 2), nn.BatchNorm1d(2)
        self.register_buffer("codes", torch.zeros(6))
        self.register_buffer("mask", torch.full((3,), -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.lerp_(x.detach().mean(0), 0.1)
        return self.norm(self.linear(x - self.codes))


def _told_of_buffers(
    sharding: str, accumulation: int, per_worker: int
) -> tuple[list[str], Tensor]:
    """The warnings, and the codes at the end."""
    torch.manual_seed(1)
    run = make_run(
        Codebook(),
        sharding=sharding,
        accumulation=accumulation,
        per_worker_batch_size=per_worker,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        drive(run)
    return [
        text for each in told if "changes the buffer" in (text := str(each.message))
    ], run.module.get_buffer("codes")


def test_a_buffer_that_each_forward_pass_changes_is_told_of_once(pool: Any) -> None:
    text = (
        "The forward pass changes the buffer 'codes' in each micro-batch; the base run "
        "changes it once a step"
    )
    expected = [codes for _, codes in pool(2).run(_told_of_buffers, "none", 1, BATCH)]
    for sharding in ("none", "zero2", "fsdp2"):
        (first, codes), (other, others) = pool(2).run(
            _told_of_buffers, sharding, 1, BATCH
        )
        assert [each.startswith(text) for each in first] == [True]
        assert other == []
        # rank 0's to all before each step
        for found, codes_of_ddp in zip((codes, others), expected, strict=True):
            torch.testing.assert_close(found, codes_of_ddp)
    assert len(_told_of_buffers("none", 2, BATCH)[0]) == 1
    assert _told_of_buffers("none", 1, BATCH)[0] == []  # as in the base run


def _average_with_batch_norm(folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and buffers of the average at a checkpoint, and after a resume from
    it.
    """

    def run() -> tuple[Run, EffectiveAverage]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        average = EffectiveAverage(model, 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = AdaScaleConfig(
            base_batch_size=BATCH, total_steps=STEPS, per_worker_batch_size=BATCH
        )
        extra: Any = {
            "extra_state": {"average": average},
            "after_step": average.update_parameters,
        }
        return Run(
            model,
            optimizer,
            None,
            data(),
            config,
            backend=LocalBackend(folder),
            **extra,
        ), average

    def state(average: EffectiveAverage) -> list[Tensor]:
        return [t.detach().clone() for t in average.state_dict().values()]

    first, average = run()
    for x, y in first:
        first.backward(F.cross_entropy(first.model(x), y))
        if first.step() and first.state.iterations == 3:
            break
    first.save_checkpoint()
    saved = state(average)
    return saved, state(run()[1])


@pytest.mark.filterwarnings("ignore:Batch norm")
def test_an_average_of_a_model_with_batch_norm_is_saved_and_resumes_with_rank_0s_buffers(
    pool: Any, tmp_path: Path
) -> None:
    (saved, resumed), (others, others_resumed) = pool(2).run(
        _average_with_batch_norm, str(tmp_path)
    )
    assert not all(map(torch.equal, saved, others))  # batch norm's, of unequal examples
    assert all(map(torch.equal, resumed, saved))
    assert all(map(torch.equal, others_resumed, saved))


# ---- the optimizer's parameters ------------------------------------------------------


def replaced_head(model: nn.Sequential) -> nn.Module:
    model[1] = nn.Linear(8, 2)
    return model


@pytest.mark.parametrize(
    "change", [copy.deepcopy, replaced_head], ids=["deepcopy", "replaced head"]
)
@pytest.mark.parametrize("how", ["run", "attach", "class"])
def test_an_optimizer_of_another_model_is_refused(
    change: Callable[[Any], nn.Module], how: str
) -> None:
    model = transfer_model()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    with pytest.raises(
        ValueError, match=r"^2 of the optimizer's 2 parameters are not in the model"
    ):
        built(how, change(model), optimizer)


@pytest.mark.parametrize("how", ["run", "attach"])
def test_a_trainable_parameter_that_no_group_has_is_named(how: str) -> None:
    model = transfer_model().requires_grad_(True)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(
        ValueError,
        match=r"^No parameter group has 4 parameters: '0\.0\.weight', '0\.0\.bias', .*freeze",
    ):
        built(how, model, optimizer)
    model[0].requires_grad_(False)
    built(how, model, optimizer)


def new_layer(model: nn.Sequential) -> None:
    model[1] = nn.Linear(8, 2)


def further_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def parametrized(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[1])


def with_old_weight_norm(model: nn.Sequential) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model[1])


def past_the_attributes(model: nn.Sequential) -> None:
    model._modules["1"] = nn.Linear(8, 2)


def unfrozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def changed_in_step_3(
    change: Callable[[Any], None], **settings: Any
) -> tuple[int, nn.Module]:
    """Train with a change of the model after a step. Return the last step."""
    model, steps = transfer_model(), 0
    run = make_run(model, **settings)
    try:
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            steps += run.step()
            if steps == 3 and run.at_boundary:
                change(model)
    except RuntimeError as error:
        error.add_note(f"after step {steps}")
        raise
    return steps, model


@pytest.mark.parametrize(
    ("change", "names", "last"),
    [
        (new_layer, "2 parameters: '1.weight', '1.bias'", 3),
        (further_layer, "2 parameters: '2.weight', '2.bias'", 3),
        (parametrized, "2 parameters: '1.parametrizations.weight.original0', ", 3),
        (with_old_weight_norm, "2 parameters: '1.weight_g', '1.weight_v'", 3),
        (past_the_attributes, "2 parameters: '1.weight', '1.bias'", 3),
        # torch calls no hook: at the report of the run's end
        (unfrozen, "4 parameters: '0.0.weight', '0.0.bias', '0.1.weight', ", STEPS),
    ],
)
def test_a_part_that_the_loop_adds_to_the_model_is_refused(
    change: Callable[[Any], None], names: str, last: int
) -> None:
    with pytest.raises(RuntimeError) as caught:
        changed_in_step_3(change)
    assert f"No parameter group has {names}" in str(caught.value)
    assert "starting_step=int(run.effective_steps)" in str(caught.value)
    assert caught.value.__notes__ == [f"after step {last}"]


def _new_layer(sharding: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        changed_in_step_3(new_layer, sharding=sharding)
    return str(caught.value)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
def test_a_new_layer_is_refused_on_each_worker(pool: Any, sharding: str) -> None:
    for error in pool(2).run(_new_layer, sharding):
        assert "No parameter group has 2 parameters: '1.weight', '1.bias'" in error


class Taught(nn.Module):
    """Makes a teacher in its first forward pass, which is never trained, and not
    frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.student)
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x) + taught


def _taught(sharding: str) -> int:
    torch.manual_seed(2)
    run = make_run(Taught(), sharding=sharding)
    drive(run)
    return run.optimizer.steps


def test_a_teacher_that_the_first_pass_makes_is_no_new_part() -> None:
    assert _taught("none") == STEPS


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_on_several_workers_a_teacher_is_no_new_part(pool: Any, sharding: str) -> None:
    # with a batch of 16 each step is worth at least one step of the base run
    assert all(0 < steps <= STEPS for steps in pool(2).run(_taught, sharding))


def _as_safetensors(sharding: str, folder: Path) -> bool:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    run = make_run(model, sharding=sharding)
    drive(run)
    path = folder / f"rank{dist.get_rank()}.safetensors"
    save_file(run.module.state_dict(), path)
    loaded = load_file(path)
    return all(
        torch.equal(loaded[name], value)
        for name, value in run.module.state_dict().items()
    )


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_the_weights_can_be_saved_as_safetensors(
    pool: Any, tmp_path: Path, sharding: str
) -> None:
    """It refuses tensors of one storage, such as views of a bucket."""
    assert all(pool(2).run(_as_safetensors, sharding, tmp_path))


def frozen_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2).requires_grad_(False))


def put_back(model: nn.Sequential) -> None:
    head = model[1]
    model[1] = nn.Linear(8, 2)
    model[1] = head


def a_copy(model: nn.Sequential) -> None:
    copy.deepcopy(model).append(nn.Linear(2, 2))


def attached_and_changed(change: Callable[[Any], None]) -> int:
    """The same in a loop of one's own. Return the steps."""
    model = transfer_model()
    adascale, schedule = attach(
        model,
        torch.optim.SGD(model[1].parameters(), lr=0.1),
        None,
        AdaScaleConfig(
            base_batch_size=8, per_worker_batch_size=4, accumulation=2, total_steps=120
        ),
    )
    x, y = data().tensors
    steps = 0
    while not schedule.finished:
        for rows in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
        try:
            adascale.step()
        except RuntimeError as error:
            error.add_note(f"after step {steps}")
            raise
        schedule.step()
        adascale.zero_grad()
        steps += 1
        if steps == 3:
            change(model)
    return steps


@pytest.mark.filterwarnings("ignore:The noise of 3 steps in a row")
@pytest.mark.parametrize(
    "change", [new_layer, further_layer, parametrized, with_old_weight_norm]
)
def test_a_part_that_is_changed_after_attach_is_refused(
    change: Callable[[Any], None],
) -> None:
    with pytest.raises(RuntimeError, match="No parameter group has 2 param") as caught:
        attached_and_changed(change)
    assert caught.value.__notes__ == ["after step 49"]  # every fiftieth looks
    assert "attach(..., starting_step=)" in str(caught.value)


@pytest.mark.parametrize("change", [put_back, frozen_layer])
def test_a_change_after_attach_that_leaves_nothing_untrained_is_none(
    change: Callable[[Any], None],
) -> None:
    assert attached_and_changed(change) == 120


@pytest.mark.parametrize("change", [frozen_layer, put_back, a_copy])
def test_a_change_that_leaves_nothing_untrained_is_none(
    change: Callable[[Any], None],
) -> None:
    assert changed_in_step_3(change)[0] == STEPS


def test_a_run_begins_in_the_middle_with_a_new_layer() -> None:
    model, steps = transfer_model(), 0
    run = make_run(model)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step()
        if steps == 3:
            break
    new_layer(model)
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    run = make_run(model, optimizer=optimizer, starting_step=int(run.effective_steps))
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step()
    assert steps == STEPS
    assert not torch.equal(model[1].weight, before)


def test_a_loop_that_leaves_a_run_goes_on_with_plain_objects() -> None:
    """As the FAQ says."""
    model = transfer_model()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    settings = AdaScaleConfig(
        base_batch_size=BATCH,
        total_steps=STEPS,
        scheduler_unit="step",
        accumulation=2,
    )
    run = Run(model, optimizer, scheduler, data(), settings)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step() and run.state.iterations == 2:
            break
    run.optimizer.unhook()
    tau = int(run.effective_steps)
    assert tau > 2
    assert scheduler.last_epoch == tau
    assert all("momentum_buffer" in state for state in optimizer.state.values())
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (tau + 2))


def built(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    if how == "run":
        return make_run(model, optimizer=optimizer)
    if how == "attach":
        return attach(
            model,
            optimizer,
            None,
            AdaScaleConfig(
                base_batch_size=8,
                per_worker_batch_size=4,
                accumulation=2,
                total_steps=9,
            ),
        )
    return AdaScale(optimizer, scale=2.0, num_gradients_to_accumulate=2, model=model)


# ---- learning rates that the loop sets -----------------------------------------------


@pytest.mark.parametrize("scheduler", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_lr_that_the_loop_sets_is_refused(
    scheduler: bool, accumulation: int
) -> None:
    run = make_run(transfer_model(), scheduler=scheduler, accumulation=accumulation)
    seen = 0

    def in_loop(run: Run) -> None:
        nonlocal seen
        seen += 1
        for group in run.optimizer.param_groups:
            if seen == 5:
                group["lr"] = 0.02

    with pytest.raises(
        RuntimeError,
        match=r"is 0\.02, and the schedule set 0\.[01].*Delete the line.*LambdaLR",
    ):
        drive(run, in_loop)


def test_an_lr_that_the_loop_sets_to_the_schedules_value_is_right() -> None:
    run = make_run(transfer_model(), scheduler=True)
    drive(
        run,
        lambda run: run.optimizer.param_groups[0].update(
            lr=0.1 * 0.5 ** (int(run.effective_steps) // 2)
        ),
    )
    assert run.stopped == "total_steps reached"


def test_an_lr_set_by_hand_beside_a_tau_schedule_is_refused() -> None:
    model = transfer_model()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    adascale = AdaScale(optimizer, scale=1.0)
    schedule = TauSchedule(adascale, scheduler, "step", total_steps=9)
    x, y = data().tensors
    F.cross_entropy(model(x), y).backward()
    optimizer.param_groups[0]["lr"] = 0.03
    with pytest.raises(RuntimeError, match=r"is 0\.03, and the schedule set 0\.1"):
        adascale.step()
    assert schedule.effective_steps == 0


class SetsLR(torch.optim.SGD):
    """Halves its LR at the end of each step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.param_groups[0]["lr"] *= 0.5
        return result


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def lr_setting(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "step":
        return SetsLR(params, lr=0.1)
    optimizer = torch.optim.SGD(params, lr=0.1)
    if kind == "pre-hook":
        optimizer.register_step_pre_hook(halve)
    else:
        optimizer.register_step_post_hook(halve)
    return optimizer


@pytest.mark.parametrize("kind", ["step", "pre-hook", "post-hook"])
def test_an_lr_that_the_optimizers_own_step_sets_stays_at_scale_one_and_is_refused_above(
    kind: str,
) -> None:
    x, y = data().tensors
    losses: Callable[[nn.Module], Tensor] = lambda model: F.cross_entropy(model(x), y)  # noqa: E731
    plain, wrapped = nn.Linear(6, 2), nn.Linear(6, 2)
    wrapped.load_state_dict(plain.state_dict())
    expected, actual = (
        lr_setting(kind, plain.parameters()),
        AdaScale(lr_setting(kind, wrapped.parameters()), scale=1.0),
    )
    for _ in range(3):
        for model, optimizer in ((plain, expected), (wrapped, actual)):
            losses(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same_weights(plain, wrapped)
    assert actual.param_groups[0]["lr"] == expected.param_groups[0]["lr"] == 0.1 / 8

    larger = AdaScale(
        lr_setting(kind, wrapped.parameters()), scale=2.0, num_gradients_to_accumulate=2
    )
    for part in (slice(0, 40), slice(40, 96)):
        F.cross_entropy(wrapped(x[part]), y[part]).div(2).backward()
    with pytest.raises(
        RuntimeError, match=r"has set lr=0\.0\d+ in parameter group 0 .*LambdaLR"
    ):
        larger.step()


# ---- gradients that the loop clears --------------------------------------------------


@pytest.mark.parametrize("place", ["before the backward pass", "after the step"])
@pytest.mark.parametrize("of", ["optimizer", "model"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_zero_grad_left_in_the_loop_is_harmless_or_refused(
    place: str, of: str, accumulation: int
) -> None:
    model, expected = transfer_model(), transfer_model()
    model[0].eval()
    expected[0].eval()
    run = make_run(model, accumulation=accumulation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        def users_loop() -> None:
            for x, y in run:
                if place == "before the backward pass":
                    getattr(run, of).zero_grad()
                run.backward(F.cross_entropy(run.model(x), y))
                run.step()
                if place == "after the step":
                    getattr(run, of).zero_grad()

        if accumulation == 1:
            users_loop()
            assert same_weights(model, plain_loop(expected))
        else:
            with pytest.raises(
                RuntimeError,
                match=r"cleared between the passes.*Delete optimizer\.zero_grad\(\)",
            ):
                users_loop()


# ---- gradients that the loop reads or clips between run.backward and run.step --------


def _uses_of_gradients(sharding: str, how: str) -> tuple[str | float, bool]:
    """The norm that the loop clips at in the first step, or its error; and whether
    the run goes on after that.
    """
    model = nn.Linear(6, 2)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 12).view(2, 6))
        model.bias.zero_()
    run = make_run(model, per_worker_batch_size=BATCH, sharding=sharding)
    found: str | float = math.nan
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y) * 100)
        if isinstance(found, float) and math.isnan(found):
            try:
                if how == "clip_grad_norm_":
                    found = float(nn.utils.clip_grad_norm_(run.model.parameters(), 1.0))
                elif how == "run.clip_grad_norm_":
                    found = float(run.clip_grad_norm_(1.0) or 0)
                else:
                    grads = [
                        p.grad for p in run.module.parameters() if p.grad is not None
                    ]
                    found = sum(float(grad.norm()) ** 2 for grad in grads) ** 0.5
            except RuntimeError as error:
                found = str(error)
        run.step()
    return found, run.stopped == "total_steps reached"


@pytest.mark.also_simulated("clip_grad_norm_")
@pytest.mark.parametrize("how", ["clip_grad_norm_", "reading .grad"])
def test_gradients_between_backward_and_step_are_whole_or_raise(
    pool: Any, how: str
) -> None:
    (expected, _), _ = pool(2).run(_uses_of_gradients, "none", "run.clip_grad_norm_")
    for sharding in ("none", "oss", "auto", "fsdp2"):
        for found, ended in pool(2).run(_uses_of_gradients, sharding, how):
            assert ended
            if sharding == "auto":  # zero2
                assert "gradient is sharded" in found
                assert "run.clip_grad_norm_()" in found
            elif (
                how == "clip_grad_norm_" or sharding != "fsdp2"
            ):  # under fsdp2 .grad is a DTensor, whose norm torch reduces
                assert found == pytest.approx(expected, rel=1e-5)


# ---- what a run is not ---------------------------------------------------------------


def test_a_run_has_no_length_and_says_what_a_progress_bar_takes() -> None:
    run = make_run(transfer_model())
    with pytest.raises(TypeError, match=r"total=run\.total_steps\), run\.progress"):
        len(run)
    assert run
    assert (
        sum(
            1
            for x, y in run
            for _ in [run.backward(F.cross_entropy(run.model(x), y)), run.step()]
        )
        == 2 * STEPS
    )


class TwoSteps(torch.optim.SGD):
    """As SAM's optimizers, whose loop calls first_step and second_step."""

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("call first_step and second_step")


def test_an_optimizer_whose_step_is_no_step_says_what_to_give_in_its_place() -> None:
    model, generator = nn.Linear(6, 2), torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(16, 6, generator=generator),
        torch.randint(2, (16,), generator=generator),
    )
    run = Run(
        model,
        TwoSteps(model.parameters(), lr=0.1),
        None,
        dataset,
        AdaScaleConfig(base_batch_size=4, total_steps=2),
    )
    with pytest.raises(NotImplementedError, match="first_step") as caught:
        drive(run)
    assert (
        "ray_adascale.attach(), such as sam.base_optimizer" in caught.value.__notes__[0]
    )


# ---- random streams ------------------------------------------------------------------


def _dropout_of(
    folder: str | None, stop: int | None, seeds: tuple[int, int]
) -> tuple[list[float], list[float]]:
    """What this worker's generators gave in each step, and the weights."""
    torch.manual_seed(seeds[torch.distributed.get_rank()])
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    every = (
        {}
        if folder is None
        else {"backend": WaitingBackend(folder), "checkpoint_every_s": 1e-9}
    )
    run = make_run(model, per_worker_batch_size=BATCH, total_steps=8, **every)
    drawn = []
    model[1].register_forward_hook(
        lambda _, __, out: drawn.append(float(((out != 0) * torch.arange(16)).sum()))
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        drawn[-1] += 1000 * np.random.rand() + 100 * random.random()  # noqa: NPY002
        run.step()
        if len(drawn) == stop:
            break
    return drawn, [float(p.detach().sum()) for p in model.parameters()]


def test_equal_seeds_on_all_workers_give_each_rank_its_own_stream(
    pool: Any, tmp_path: Path
) -> None:
    whole = pool(2).run(_dropout_of, None, None, (0, 0))
    (first, weights), (second, other_weights) = whole
    assert weights == other_weights
    assert all(a != b for a, b in zip(first, second, strict=True))
    # A stopped run goes on with the streams of its checkpoint.
    begun = pool(2).run(_dropout_of, str(tmp_path), 2, (0, 0))
    rest = pool(2).run(_dropout_of, str(tmp_path), None, (0, 0))
    assert [
        drawn + more for (drawn, _), (more, _) in zip(begun, rest, strict=True)
    ] == [first, second]
    # Streams of one's own stay: rank 0 draws what it drew before, and rank 1 what its
    # seed gives.
    (own, _), (others, _) = pool(2).run(_dropout_of, None, None, (0, 1))
    assert own == first
    assert others != second


# ---- data of one's own ---------------------------------------------------------------


def _own_batches(seed: int) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(BATCH, 6, generator=generator)
            yield x, (x[:, 0] > 0).long()

    return batches


class Stream:
    def __init__(self, seed: int) -> None:
        self.batches = _own_batches(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches()


def _warnings_of(seeds: tuple[int, int], dropout: float) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(
        base_batch_size=BATCH, per_worker_batch_size=BATCH, total_steps=20
    )
    run = Run(
        model, optimizer, None, Stream(seeds[torch.distributed.get_rank()]), config
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drive(run)
    return [str(warning.message) for warning in caught]


def test_workers_that_read_the_same_examples_are_warned_of(pool: Any) -> None:
    (first, *others), on_others = pool(2).run(_warnings_of, (4, 4), 0.0)
    assert first.startswith("The data of ranks 0, 1 begin with the same micro-batch")
    assert [
        text.startswith(
            "All gradient samples of a step were equal in 10 steps in a row"
        )
        for text in others
    ] == [True]
    assert on_others == []
    # dropout differs
    assert [len(found) for found in pool(2).run(_warnings_of, (4, 4), 0.5)] == [1, 0]
    assert pool(2).run(_warnings_of, (4, 5), 0.0) == [[], []]


def skipping(examples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    kept = [(x, y) for x, y in examples if float(x[1]) > -1.5]
    return [torch.stack(part) for part in zip(*kept, strict=True)]


def test_a_collate_fn_that_leaves_out_examples_is_refused() -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=BATCH, total_steps=STEPS)
    run = Run(model, optimizer, None, data(), config, collate_fn=skipping)
    with pytest.raises(
        ValueError,
        match=r"collate_fn returned a batch of [67] examples for a micro-batch of 8.*Subset",
    ):
        drive(run)


@pytest.mark.parametrize(
    "layout",
    [
        lambda x, y: (x, y),
        lambda x, y: {"x": x.T, "y": {"of": y}},  # (sequence, batch)
        lambda x, y: (list(x), list(y)),  # examples of several sizes, as in detection
        # one long row, with its bounds
        lambda x, y: (x[:3].reshape(-1), torch.arange(9)),
        lambda x, y: SimpleNamespace(x=x, y=y),
    ],
)
def test_batches_of_other_layouts_are_accepted(
    layout: Callable[[Tensor, Tensor], Any],
) -> None:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> Any:
        x, y = (torch.stack(part) for part in zip(*examples, strict=True))
        return layout(x[:, :5], y)

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(
        model,
        optimizer,
        None,
        data(),
        AdaScaleConfig(base_batch_size=BATCH, total_steps=2),
        collate_fn=collate,
    )
    for _ in run:
        run.backward(run.model(torch.ones(1)).sum())
        run.step()
    assert run.stopped == "total_steps reached"


@pytest.mark.parametrize("how", ["run", "attach"])
def test_a_batch_larger_than_the_dataset_is_warned_of(how: str) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(
        base_batch_size=BATCH,
        accumulation=2,
        per_worker_batch_size=50,
        total_steps=9,
        dataset_length=96,
    )
    make = {
        "run": lambda: Run(model, optimizer, None, data(), config),
        "attach": lambda: attach(model, optimizer, None, config),
    }
    with pytest.warns(
        UserWarning,
        match=r"The batch of 100 is larger than the dataset of 96 examples.*Lower the workers",
    ):
        make[how]()


def test_a_skipped_step_has_its_mark_in_the_trace(tmp_path: Path) -> None:
    run = make_run(nn.Linear(6, 2), backend=LocalBackend(tmp_path))
    factors = iter([1.0, math.nan, *[1.0] * STEPS])

    def users_loop() -> None:
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y) * next(factors))
            run.step()

    with pytest.warns(UserWarning, match=r"Step 2 was skipped"):
        users_loop()
    rows = read_trace(tmp_path)
    assert [row["step"] for row in rows if row.get("skipped")] == [2]
    assert (len(rows), run.summary()["skipped_steps"]) == (STEPS + 1, 1)


def _saves_late(folder: str) -> list[str]:
    """The warnings of a worker that saves, while rank 1 comes a little later."""
    run = make_run(
        nn.Linear(6, 2), per_worker_batch_size=BATCH, backend=LocalBackend(folder)
    )
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ray_adascale").addHandler(handler)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            break
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "_LONG_S", 0.2)
        time.sleep(0.6 * torch.distributed.get_rank())
        run.save_checkpoint()
    logging.getLogger("ray_adascale").removeHandler(handler)
    return [text for text in told if "save_checkpoint" in text]


def test_a_worker_that_saves_alone_says_what_it_waits_for(
    pool: Any, tmp_path: Path
) -> None:
    (text,), _ = pool(2).run(_saves_late, str(tmp_path))
    assert text.startswith("Rank 0 has been in run.save_checkpoint() for 0 s.")
    assert "Call it on every worker, not on rank 0 alone" in text


def _hooked(sharding: str) -> list[str]:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_run(
            model, optimizer=optimizer, per_worker_batch_size=BATCH, sharding=sharding
        )
    return [str(warning.message) for warning in caught]


def test_step_hooks_of_an_optimizer_that_is_sharded_are_warned_of(pool: Any) -> None:
    (told, others), whole = pool(2).run(_hooked, "auto"), pool(2).run(_hooked, "none")
    assert [
        text.startswith("SGD has hooks around its step. With sharded state")
        for text in told
    ] == [True]
    assert others == []
    assert whole == [[], []]


# ---- passes of the loop's own --------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_backward_pass_in_evaluate_is_told_of_autograd(accumulation: int) -> None:
    def gradient(net: nn.Module, how: str) -> dict[str, float]:
        x, y = data().tensors
        with torch.enable_grad():
            loss = F.cross_entropy(net(x), y)
            if how == "backward":
                loss.backward()
            else:
                torch.autograd.grad(loss, list(net.parameters()))
        return {"loss_of_all": float(loss)}

    def trained(how: str) -> None:
        drive(
            make_run(
                nn.Linear(6, 2),
                evaluate=lambda net: gradient(net, how),
                accumulation=accumulation,
                per_worker_batch_size=BATCH,
            )
        )

    trained("grad")
    with pytest.raises(RuntimeError, match=r"in evaluate.*call torch\.autograd\.grad"):
        trained("backward")


@pytest.mark.parametrize("how", ["merged", "swapped", "perturbed"])
def test_an_evaluation_before_the_backward_pass_leaves_no_stale_casts(how: str) -> None:
    """Autocast kept the casts of the weights that the evaluation had."""

    def evaluation(run: Run) -> None:
        weight = run.module[0].weight
        kept = weight.detach().clone()
        if how == "perturbed":  # in train mode, with gradients on
            with torch.no_grad():
                weight.mul_(-2.0)
            run.module(data().tensors[0])
            with torch.no_grad():
                weight.copy_(kept)
            return
        with torch.no_grad():
            run.module.eval()
            if how == "swapped":
                weight.mul_(-2.0)
            run.module(data().tensors[0])
            run.module.train()
            weight.copy_(kept)

    def trained(evaluates: bool) -> Tensor:
        torch.manual_seed(2)
        model = nn.Sequential(Merging(6, 8), nn.ReLU(), nn.Linear(8, 2))
        model.requires_grad_(True)
        nn.init.normal_(model[0].b)  # type: ignore[arg-type]
        run = make_run(model, precision="bf16")
        drive(run, evaluation if evaluates else lambda run: None)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(True), trained(False))


# ---- a compiled step -----------------------------------------------------------------


def compiled_steps(run: Run, compile_it: bool) -> list[float]:
    """The τ after each step of a loop whose whole step may be compiled."""

    def one(x: Tensor, y: Tensor) -> bool:
        loss = F.cross_entropy(run.model(x), y)
        run.backward(loss)
        run.clip_grad_norm_(5.0)
        return run.step(above=(loss > 0.5).float())

    if compile_it:
        one = torch.compile(one, backend="eager")
    return [run.effective_steps for x, y in run if one(x, y)]


# Dynamo reads it, and hides the warning unless warnings are errors
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not")
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_compiled_as_a_whole_is_the_same(fused: bool) -> None:
    def found(compile_it: bool) -> tuple[list[float], Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(6, 2)
        run = make_run(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
            scheduler=True,
            base_batch_size=4,
            per_worker_batch_size=4,
            accumulation=2,
        )
        return compiled_steps(run, compile_it), model.weight.detach()

    (taus, weights), (expected, expected_weights) = found(True), found(False)
    assert taus == expected
    assert torch.equal(weights, expected_weights)


# ---- reductions by hand --------------------------------------------------------------


def _reduced_by_hand(when: str, passes: int) -> float | str:
    torch.manual_seed(0)
    run = make_run(
        nn.Linear(6, 2),
        base_batch_size=4,
        per_worker_batch_size=4,
        accumulation=passes,
        sharding="zero2",
    )
    try:
        for x, y in run:
            if when == "before":
                run.model.reduce()
            run.backward(F.cross_entropy(run.model(x), y))
            if when == "after" and run.is_last_pass:
                run.model.reduce()
            if when == "each pass":
                run.model.reduce()
            run.step()
            if when == "boundary" and run.at_boundary:
                run.model.reduce()
    except RuntimeError as error:
        return str(error)
    return run.effective_steps


@pytest.mark.parametrize("passes", [1, 2])
def test_a_reduction_by_hand_changes_nothing_or_raises(pool: Any, passes: int) -> None:
    def found(when: str) -> float | str:
        first, second = pool(2).run(_reduced_by_hand, when, passes)
        assert first == second
        return first

    assert found("after") == found("never")
    for when in ("before", "boundary", *(["each pass"] if passes > 1 else [])):
        assert "reduce() comes before the backward pass of" in str(found(when))


def _adaptive_weight(inside: bool, sharding: str, accumulation: int) -> list[float]:
    """A loss whose weight comes from torch.autograd.grad() of a parameter, as in
    VQGAN and GradNorm; here it comes to 1.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    run = make_run(
        model,
        sharding=sharding,
        accumulation=accumulation,
        per_worker_batch_size=BATCH // 2,
    )
    gains = []
    for x, y in run:
        loss = F.cross_entropy(run.model(x), y)
        if inside:
            (grad,) = torch.autograd.grad(loss, model[2].weight, retain_graph=True)
            loss = loss * (grad.norm() / grad.norm().clamp(min=1e-12)).detach()
        run.backward(loss)
        run.step()
        gains.append(run.gain)
    return [
        *gains,
        run.effective_steps,
        *torch.cat([p.detach().flatten() for p in run.module.parameters()]).tolist(),
    ]


@pytest.mark.parametrize("sharding", ["none", "oss"])
@pytest.mark.parametrize(("workers", "accumulation"), [(1, 4), (2, 1), (2, 2)])
def test_a_gradient_that_the_loss_needs_is_no_pass(
    pool: Any, workers: int, accumulation: int, sharding: str
) -> None:
    plain = pool(workers).run(_adaptive_weight, False, sharding, accumulation)
    inside = pool(workers).run(_adaptive_weight, True, sharding, accumulation)
    assert inside == plain


def _own_backward(sharding: str, accumulation: int, after: bool, at: int) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    run = make_run(
        model,
        sharding=sharding,
        accumulation=accumulation,
        per_worker_batch_size=BATCH // 2,
        total_steps=40,
    )
    try:
        for i, (x, y) in enumerate(run):
            loss = F.cross_entropy(run.model(x), y)
            if i == at and not after:
                (loss * 2).backward(retain_graph=True)
            run.backward(loss)
            if i == at and after:
                run.model(x).square().mean().backward()
            run.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("at", [0, 9])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sharding", ["none", "oss"])
@pytest.mark.parametrize(("workers", "accumulation"), [(1, 4), (2, 1), (2, 2)])
def test_a_backward_pass_of_the_loops_own_is_refused(
    pool: Any, workers: int, accumulation: int, sharding: str, after: bool, at: int
) -> None:
    for told in pool(workers).run(_own_backward, sharding, accumulation, after, at):
        assert "backward" in told


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("how", ["setting", "call"])
def test_clipping_at_the_base_batch_is_the_plain_loops_whatever_the_groups(
    how: str, chain: bool
) -> None:
    """``clip_grad_norm_(model.parameters())`` sums in the model's order; the groups
    here have another one.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(
            *(part for _ in range(4) for part in (nn.Linear(6, 6), nn.Tanh())),
            nn.Linear(6, 2),
        )
        weights, biases = (
            [p for p in model.parameters() if (p.dim() > 1) == decays]
            for decays in (True, False)
        )
        if chain:
            return model, OptimizerChain(
                [torch.optim.SGD(biases, lr=0.1), torch.optim.SGD(weights, lr=0.1)]
            )
        groups = [{"params": biases}, {"params": weights, "weight_decay": 0.1}]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    plain, optimizer = build()
    x, y = data().tensors
    for indices in epoch_order(len(x), seed=0, epoch=0).reshape(STEPS, BATCH).tolist():
        F.cross_entropy(plain(x[indices]), y[indices]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    run = make_run(
        model, optimizer=optimizer, grad_clip=0.1 if how == "setting" else None
    )
    for batch_x, batch_y in run:
        run.backward(F.cross_entropy(run.model(batch_x), batch_y))
        if how == "call":
            run.clip_grad_norm_(0.1)
        run.step()
    assert same_weights(model, plain)


# ---- what depends on the size of a micro-batch ---------------------------------------


def _loss_of(how: str, out: Tensor, y: Tensor) -> Tensor:
    return {
        "mean": lambda: F.cross_entropy(out, y),
        "sum": lambda: F.cross_entropy(out, y, reduction="sum"),
        "sum of a vector": lambda: F.cross_entropy(out, y, reduction="none").sum(),
        "sum and a penalty": lambda: (
            0.1 * out.square().sum() + F.cross_entropy(out, y, reduction="sum")
        ),
        "sum, divided": lambda: F.cross_entropy(out, y, reduction="sum") / len(y),
        "mean of sums": lambda: (out - y[:, None]).square().sum(1).mean(),
        "sum of means": lambda: (out - y[:, None]).square().mean(0).sum(),
        "mean and a penalty": lambda: (
            F.cross_entropy(out, y) + 0.1 * out.square().sum()
        ),
    }[how]()


@pytest.mark.parametrize(
    ("size", "passes"), [(BATCH, 2), (2 * BATCH, 2), (BATCH // 2, 4), (BATCH // 2, 2)]
)
@pytest.mark.parametrize(
    "how",
    [
        "mean",
        "sum",
        "sum of a vector",
        "sum and a penalty",
        "sum, divided",
        "mean of sums",
        "sum of means",
        "mean and a penalty",
    ],
)
def test_a_summed_loss_is_warned_of_once_where_the_micro_batch_is_not_the_base_batch(
    how: str, size: int, passes: int
) -> None:
    run = make_run(
        nn.Linear(6, 2), per_worker_batch_size=size, accumulation=passes, total_steps=20
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for x, y in run:
            run.backward(_loss_of(how, run.model(x), y))
            run.step()
    told = [
        str(each.message) for each in heard if "looks like a sum" in str(each.message)
    ]
    summed = how in ("sum", "sum of a vector", "sum and a penalty")
    assert len(told) == (summed and size != BATCH)


@pytest.mark.parametrize(("size", "told"), [(BATCH, 0), (BATCH // 2, 1)])
@pytest.mark.parametrize("frozen", [False, True])
def test_batch_norm_with_fewer_examples_than_the_base_batch_is_warned_of_once(
    frozen: bool, size: int, told: int
) -> None:
    model = transfer_model()
    run = make_run(model, per_worker_batch_size=size, accumulation=4)
    if frozen:
        model[0].eval()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        drive(run)
    found = [
        str(each.message)
        for each in heard
        if str(each.message).startswith("Batch norm")
    ]
    assert len(found) == (0 if frozen else told)
    assert all(
        "('0.1') computes its statistics over 4 examples. If the base run was one "
        "process, it had 8" in m
        for m in found
    )


# ---- state of the user's own ---------------------------------------------------------


class _Teacher(nn.Module):
    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, student: nn.Module) -> None:
        for mine, its in zip(self.net.parameters(), student.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * its.data  # as BYOL's code has it


@pytest.mark.parametrize(
    ("where", "told"),
    [("after run.step()", 1), ("before run.step()", 0), ("after_step", 0)],
)
def test_a_teacher_that_moves_after_the_step_is_warned_of_once(
    where: str, told: int
) -> None:
    model = nn.Linear(6, 2)
    teacher = _Teacher(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(
        model,
        optimizer,
        None,
        data(),
        AdaScaleConfig(base_batch_size=BATCH, total_steps=STEPS),
        extra_state={"teacher": teacher, "own": PerWorker(torch.Generator())},
        after_step=teacher.follow if where == "after_step" else None,
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            if where == "before run.step()":
                teacher.follow(model)
            run.step()
            if where == "after run.step()":
                teacher.follow(model)
    found = [str(each.message) for each in heard if "extra_state" in str(each.message)]
    assert len(found) == told
    assert all(
        "'teacher' has changed between run.step() and the next micro-batch" in text
        for text in found
    )


class _Counter:
    def __init__(self) -> None:
        self.drawn, self.last = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.last = state["drawn"], state["last"]


def _own_generators(
    folder: str | None, stop: int | None, declared: bool = True
) -> list[Any]:
    """Augment by each worker's own generators, and count. Return what they would
    draw next, and the weights.
    """
    rank = dist.get_rank()
    torch_s, numpy_s, counter = (
        torch.Generator().manual_seed(rank),
        np.random.default_rng(rank),
        _Counter(),
    )
    legacy = np.random.Generator(np.random.MT19937(rank))
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    own: dict[str, Any] = {
        "torch": torch_s,
        "numpy": numpy_s,
        "count": counter,
        "legacy": legacy,
    }
    extra = {name: PerWorker(each) for name, each in own.items()}
    run = Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        data(),
        AdaScaleConfig(base_batch_size=BATCH, total_steps=STEPS),
        extra_state=extra,
        backend=None if folder is None else LocalBackend(folder),
    )
    for x, y in run:
        noise = (
            torch.randn(x.shape, generator=torch_s)
            + float(numpy_s.random())
            + float(legacy.random())
        )
        counter.drawn, counter.last = counter.drawn + 1 + rank, noise[0, :2]
        run.backward(F.cross_entropy(run.model(x + 0.1 * noise), y))
        run.step()
        if run.state.iterations == stop:
            run.save_checkpoint()
            break
    drawn = [
        torch.rand(3, generator=torch_s).tolist(),
        numpy_s.random(3).tolist(),
        legacy.random(2).tolist(),
    ]
    return [drawn, counter.drawn, counter.last.tolist(), model.weight.tolist()]


def test_each_worker_resumes_with_its_own_generators(pool: Any, tmp_path: Path) -> None:
    whole = pool(2).run(_own_generators, None, None)
    assert whole[0][:2] != whole[1][:2]
    pool(2).run(_own_generators, str(tmp_path), 5)
    assert pool(2).run(_own_generators, str(tmp_path), None) == whole


def _told_of_other_number(folder: str) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _own_generators(folder, None)
    return [str(each.message) for each in heard if "extra_state" in str(each.message)]


def test_on_another_number_of_workers_a_workers_own_state_begins_anew_and_that_is_told(
    pool: Any, tmp_path: Path
) -> None:
    pool(2).run(_own_generators, str(tmp_path), 5)
    ((told,),) = pool(1).run(_told_of_other_number, str(tmp_path))
    assert (
        "of 2 workers has no extra_state 'count', 'legacy', 'numpy', 'torch' for 1 "
        "worker: it begins as built" in told
    )


def _stream_of_start(folder: str | None) -> list[int]:
    """Return torch's random stream after a run is built, and resumed if there is a
    folder.
    """
    model = nn.Linear(6, 2)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of extra_state
        Run(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            None,
            data(),
            AdaScaleConfig(base_batch_size=BATCH, total_steps=STEPS),
            backend=None if folder is None else LocalBackend(folder),
        )
    return list(torch.get_rng_state().tolist())


@pytest.mark.parametrize("workers", [1, 2])
def test_random_streams_are_loaded_on_as_many_workers_alone(
    pool: Any, tmp_path: Path, workers: int
) -> None:
    pool(2).run(_own_generators, str(tmp_path), 5)
    as_built = pool(workers).run(_stream_of_start, None)
    resumed = pool(workers).run(_stream_of_start, str(tmp_path))
    assert (resumed == as_built) == (workers != 2)


@pytest.mark.parametrize("what", [torch.Generator(), np.random.default_rng(), object()])
def test_what_has_no_state_is_refused_as_the_run_is_built(what: Any) -> None:
    model = nn.Linear(6, 2)
    config = AdaScaleConfig(base_batch_size=BATCH, total_steps=STEPS)
    with pytest.raises(
        ValueError,
        match=r"extra_state=\{'a': \.\.\.\} of type \w+\. Must have state_dict.*PerWorker",
    ):
        Run(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            None,
            data(),
            config,
            extra_state={"a": what},
        )
    if not hasattr(what, "bit_generator") and not isinstance(what, torch.Generator):
        with pytest.raises(ValueError, match="PerWorker of a object"):
            PerWorker(what)
