"""A program against its checkpoint: what was changed is named with both values, and
what was not is matched by name.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, OptimizerChain, Run
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.run.boundary.changes import changes_since, saved_schedule

from ...samples_of import WaitingBackend

pytestmark = pytest.mark.filterwarnings("ignore:AdaScale is derived for SGD")

Make = Callable[[nn.Module], Optimizer]


def schedule(**changes: Any) -> BaseSchedule:
    fields: dict[str, Any] = {
        "base_batch_size": 4,
        "total_steps": 40,
        "lr_curve": [[0.1] * 40],
        "scheduler_unit": "step",
        "base_steps_per_epoch": 10.0,
    }
    return BaseSchedule(**(fields | changes))


def test_a_checkpoint_says_what_its_schedule_was() -> None:
    state = {
        "plan": {"base_batch_size": 4},
        "total_steps": 40,
        "scheduler_unit": "step",
        "base_steps_per_epoch": 10.0,
    }
    rows = torch.tensor([[0.1] * 40], dtype=torch.float64)
    found = saved_schedule(
        state, {"lr_curve": rows, "lr_groups": torch.tensor([[0, 1.0]])}
    )
    assert replace(found, lr_curve=[*found.lr_curve]) == schedule()
    groups = torch.tensor([[0, 1.0], [0, 0.5]], dtype=torch.float64)
    assert [
        *saved_schedule(state, {"lr_curve": rows, "lr_groups": groups}).lr_curve
    ] == [[0.1] * 40, [0.05] * 40]


def test_every_change_is_named_with_both_values() -> None:
    assert changes_since(schedule(), schedule()) == []
    found = changes_since(
        schedule(), schedule(base_batch_size=8, total_steps=20, lr_curve=[[0.2] * 20])
    )
    assert found[:2] == ["base_batch_size is 8, was 4", "total_steps is 20, was 40"]
    assert (
        "at scheduler call 0, where 0.1 is expected and the actual value is 0.2"
        in found[2]
    )


def test_the_group_that_differs_is_named() -> None:
    found = changes_since(
        schedule(lr_curve=[[0.1] * 40, [0.3] * 40]),
        schedule(lr_curve=[[0.1] * 40, [0.4] * 40]),
    )
    assert (
        "first in parameter group 1 at scheduler call 0, where 0.3 is expected"
        in found[0]
    )
    found = changes_since(schedule(), schedule(lr_curve=[[0.1] * 40, [0.4] * 40]))
    assert "parameter groups" in found[0]


# ---- hyperparameters and classes -----------------------------------------------------


def model_of(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def run_of(
    folder: Path,
    make: Make,
    schedules: Callable[[Optimizer], LRScheduler] | None = None,
    **settings: Any,
) -> Run:
    net = model_of()
    optimizer = make(net)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    defaults = {
        "base_batch_size": 4,
        "total_steps": 8,
        "scheduler_unit": "step" if schedules else None,
    }
    config = AdaScaleConfig(
        **(defaults | {"sharding": "none", "checkpoint_every_s": 1e-9} | settings)
    )
    scheduler = None if schedules is None else schedules(optimizer)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return Run(
        net,
        optimizer,
        scheduler,
        data,
        config,
        backend=WaitingBackend(folder, device="cpu"),
    )


def train(
    run: Run, steps: int, in_loop: Callable[[Run], object] = lambda run: None
) -> Run:
    taken = 0
    for x, y in run:
        in_loop(run)
        run.backward(F.mse_loss(run.model(x), y))
        taken += run.step()
        if taken == steps:
            break
    return run


def sgd(**settings: Any) -> Make:
    return lambda net: SGD(net.parameters(), **({"lr": 0.1} | settings))


def adam(kind: type[Optimizer] = AdamW, **settings: Any) -> Make:
    return lambda net: kind(net.parameters(), **({"lr": 0.01} | settings))


HYPERPARAMETERS: list[tuple[Make, Make, str, Any]] = [
    (
        sgd(weight_decay=0.01),
        sgd(weight_decay=0.1),
        "weight_decay is 0.1, was 0.01",
        0.1,
    ),
    (sgd(), sgd(momentum=0.4), "momentum is 0.4, was 0", 0.4),
    (
        sgd(),
        sgd(momentum=0.9),
        "momentum is 0.9, was 0; rule is 'adascale_memory', was 'adascale'",
        0.9,
    ),
    (
        sgd(momentum=0.9),
        sgd(momentum=0.9, nesterov=True),
        "nesterov is True, was False",
        True,
    ),
    (
        adam(),
        adam(betas=(0.8, 0.99)),
        r"betas is \[0\.8, 0\.99\], was \[0\.9, 0\.999\]",
        (0.8, 0.99),
    ),
    (adam(), adam(eps=1e-6), "eps is 1e-06, was 1e-08", 1e-6),
]


@pytest.mark.parametrize(("before", "after", "message", "value"), HYPERPARAMETERS)
def test_a_changed_hyperparameter_raises_and_is_used_where_accepted(
    tmp_path: Path, before: Make, after: Make, message: str, value: Any
) -> None:
    train(run_of(tmp_path, before), 2)
    with pytest.raises(
        ValueError,
        match=rf"changed since its checkpoint.*{message}\. .*accept_changes=True",
    ):
        run_of(tmp_path, after)
    with pytest.warns(UserWarning, match=rf"{message}\. Accepted"):
        run = train(run_of(tmp_path, after, accept_changes=True), 2)
    assert run.optimizer.param_groups[0][message.split()[0]] == value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "AdaScale is derived for SGD")
        # nothing changed since
        assert (
            run_of(tmp_path, after).optimizer.param_groups[0][message.split()[0]]
            == value
        )


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"precision": "bf16"}, "precision is 'bf16', was 'fp32'"),
        ({"grad_clip": 0.5}, "grad_clip is 0.5, was None"),
    ],
)
def test_a_changed_setting_of_the_training_raises(
    tmp_path: Path, now: dict[str, Any], message: str
) -> None:
    train(run_of(tmp_path, sgd()), 2)
    with pytest.raises(ValueError, match=f"changed since its checkpoint.*{message}"):
        run_of(tmp_path, sgd(), **now)
    with pytest.warns(UserWarning, match=f"{message}. Accepted"):
        train(run_of(tmp_path, sgd(), accept_changes=True, **now), 2)


def test_a_resume_at_another_scale_has_both_in_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(run_of(tmp_path, sgd()), 2)
    with caplog.at_level(logging.INFO, "ray_adascale"):
        run_of(tmp_path, sgd(), accumulation=2)
    assert ", 1 worker (S is 2 now, before: 1). Steps" in caplog.text


def test_a_resume_under_other_versions_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = f"{torch.__version__.partition('+')[0]}"
    with monkeypatch.context() as before:
        before.setattr(torch, "__version__", "2.11.0+cu130")
        train(run_of(tmp_path, sgd()), 2)
    with pytest.warns(
        UserWarning, match=rf"torch {now} \(before: 2\.11\.0\)"
    ) as caught:
        train(run_of(tmp_path, sgd()), 2)
    assert "ray_adascale" not in str(caught[0].message)
    with warnings.catch_warnings():  # written by this version, on a GPU
        warnings.simplefilter("error")
        monkeypatch.setattr(torch, "__version__", f"{now}+cu130")
        run_of(tmp_path, sgd())


def test_an_accepted_lr_leaves_what_the_program_did_not_change(tmp_path: Path) -> None:
    """Such as a count of the optimizer's own in its groups, or a decay that the loop
    has raised.
    """

    def in_loop(run: Run) -> None:
        run.optimizer.param_groups[0]["weight_decay"] = 0.05

    train(run_of(tmp_path, sgd(weight_decay=0.01)), 2, in_loop)
    with pytest.warns(UserWarning, match="curve differs"):
        run = run_of(tmp_path, sgd(weight_decay=0.01, lr=0.2), accept_changes=True)
    assert [run.optimizer.param_groups[0][key] for key in ("weight_decay", "lr")] == [
        0.05,
        0.2,
    ]
    train(run, 1)
    assert (
        run_of(tmp_path, sgd(weight_decay=0.01, lr=0.2)).optimizer.param_groups[0][
            "weight_decay"
        ]
        == 0.05
    )


def test_what_a_scheduler_moves_is_no_change(tmp_path: Path) -> None:
    def cycle(optimizer: Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, 0.1, total_steps=8)

    run = train(run_of(tmp_path, sgd(momentum=0.9), cycle), 3)
    momentum = run.optimizer.param_groups[0]["momentum"]
    assert momentum < 0.95
    assert (
        run_of(tmp_path, sgd(momentum=0.9), cycle).optimizer.param_groups[0]["momentum"]
        == momentum
    )
    with pytest.warns(
        UserWarning, match=r"curve differs.*momentum is 0\.9, was 0\.95\. Accepted"
    ):
        run = run_of(tmp_path, sgd(momentum=0.9), accept_changes=True)
    assert run.optimizer.param_groups[0]["momentum"] == 0.9


def chain(first: type[Optimizer]) -> Make:
    return lambda net: OptimizerChain(
        [first(net[0].parameters(), lr=0.01), SGD(net[2].parameters(), lr=0.1)]
    )


@pytest.mark.parametrize(
    ("before", "after", "classes", "name"),
    [
        (adam(), sgd(lr=0.01), ("AdamW", "SGD"), "0.weight"),
        (adam(), adam(Adam), ("AdamW", "Adam"), "0.weight"),
        (sgd(momentum=0.9, lr=0.01), adam(), ("SGD", "AdamW"), "0.weight"),
        (chain(AdamW), chain(Adam), ("AdamW", "Adam"), "0.weight"),
        # torch has a KeyError for the state that these need
        (
            adam(),
            adam(amsgrad=True),
            (r"AdamW\(amsgrad=False\)", r"AdamW\(amsgrad=True\)"),
            "0.weight",
        ),
        (
            adam(RMSprop),
            adam(RMSprop, momentum=0.9),
            (r"RMSprop\(momentum=0\)", r"RMSprop\(momentum=0.9\)"),
            "0.weight",
        ),
        (
            adam(RMSprop),
            adam(RMSprop, centered=True),
            (r"RMSprop\(.*False\)", r"RMSprop\(centered=True\)"),
            "0.weight",
        ),
    ],
)
def test_state_goes_to_an_optimizer_that_can_step_with_it_only(
    tmp_path: Path, before: Make, after: Make, classes: tuple[str, str], name: str
) -> None:
    train(run_of(tmp_path, before), 2)
    for accept in (False, True):
        with pytest.raises(
            ValueError,
            match=f"builds {classes[1]}, and .*of {classes[0]} for . parameters: "
            f"'{name}'.*starting_step=2",
        ):
            run_of(tmp_path, after, accept_changes=accept)


# ---- parameter groups ----------------------------------------------------------------


def two_groups(*order: str, lr: float = 0.1) -> Make:
    """A decay for the weights and none for the biases, the groups in an order, with
    learning rates of their own.
    """

    def make(net: nn.Module) -> Optimizer:
        named = dict(net.named_parameters())
        groups = [
            {
                "params": [p for name, p in named.items() if name.endswith(kind)],
                "weight_decay": 0.3 if kind == "weight" else 0.0,
                "lr": lr if kind == "weight" else 0.02,
            }
            for kind in order
        ]
        return SGD(groups, momentum=0.9)

    return make


def decays(run: Run) -> dict[int, float]:
    """The decay of each parameter, by its number of dimensions: 2 for weights, 1 for
    biases.
    """
    return {
        p.dim(): group["weight_decay"]
        for group in run.optimizer.param_groups
        for p in group["params"]
    }


def weights(run: Run) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in run.module.parameters()])


def reordered(folder: str, sharding: str) -> tuple[dict[int, float], Tensor, Tensor]:
    """The decays after a resume with the groups in another order, the weights, and
    those of an unbroken run.
    """
    path, order = Path(folder), ("weight", "bias")
    whole = train(
        run_of(
            path / "whole",
            two_groups(*order),
            sharding=sharding,
            per_worker_batch_size=4,
        ),
        4,
    )
    train(
        run_of(
            path / "cut", two_groups(*order), sharding=sharding, per_worker_batch_size=4
        ),
        2,
    )
    resumed = run_of(
        path / "cut",
        two_groups(*order[::-1]),
        sharding=sharding,
        per_worker_batch_size=4,
    )
    train(resumed, 2)
    return decays(resumed), weights(resumed), weights(whole)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_groups_in_another_order_keep_their_hyperparameters(
    pool: Any, tmp_path: Path, sharding: str
) -> None:
    workers = 1 if sharding == "none" else 2
    for found, resumed, whole in pool(workers).run(reordered, str(tmp_path), sharding):
        assert found == {2: 0.3, 1: 0.0}
        torch.testing.assert_close(
            resumed, whole
        )  # norms are summed in the order of the groups, so the gain rounds otherwise


def test_a_chain_whose_optimizers_are_listed_in_another_order_goes_on(
    tmp_path: Path,
) -> None:
    def make(reverse: bool) -> Make:
        def optimizers(net: nn.Module) -> Optimizer:
            parts = [
                AdamW(net[0].parameters(), lr=0.01),
                SGD(net[2].parameters(), lr=0.1, weight_decay=0.2),
            ]  # type: ignore[index]
            return OptimizerChain(parts[::-1] if reverse else parts)

        return optimizers

    whole = train(run_of(tmp_path / "whole", make(False)), 4)
    train(run_of(tmp_path / "cut", make(False)), 2)
    resumed = train(run_of(tmp_path / "cut", make(True)), 2)
    assert torch.equal(weights(resumed), weights(whole))


def test_other_groups_are_compared_by_their_parameters(tmp_path: Path) -> None:
    train(run_of(tmp_path / "one", sgd(momentum=0.9, weight_decay=0.3)), 2)
    message = r"weight_decay is 0\.0, was 0\.3, for 2 parameters: '0\.bias', '2\.bias'"
    with pytest.raises(
        ValueError,
        match=rf"curve differs.*at scheduler call 0, where 0\.1 is expected.*0\.02.*; {message}",
    ):
        run_of(tmp_path / "one", two_groups("weight", "bias"))
    with pytest.warns(UserWarning, match=message):
        resumed = run_of(
            tmp_path / "one", two_groups("weight", "bias"), accept_changes=True
        )
    assert decays(resumed) == {2: 0.3, 1: 0.0}
    assert len(resumed.optimizer.state) == 4  # by name, so the momenta are there

    def layers(net: nn.Module) -> Optimizer:
        return SGD(
            [{"params": part.parameters()} for part in (net[2], net[0])],
            lr=0.1,
            momentum=0.9,
        )  # type: ignore[index]

    train(run_of(tmp_path / "same", sgd(momentum=0.9)), 2)
    # with equal settings groups change nothing
    assert run_of(tmp_path / "same", layers).effective_steps == 2


def test_a_change_in_one_group_is_named_by_its_parameters(tmp_path: Path) -> None:
    train(run_of(tmp_path, two_groups("weight", "bias")), 1)

    def other(net: nn.Module) -> Optimizer:
        made = two_groups("bias", "weight", lr=0.4)(net)
        made.param_groups[0]["weight_decay"] = 0.1
        return made

    with pytest.raises(
        ValueError,
        match=r"weight_decay is 0\.1, was 0\.0, for 2 parameters: '0\.bias', '2\.bias'",
    ) as raised:
        run_of(tmp_path, other)
    assert (
        "in parameter group 1 at scheduler call 0, where 0.1 is expected and the "
        "actual value is 0.4" in str(raised.value)
    )
