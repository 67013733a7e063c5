"""Run: the loop in one process and on gloo workers, without Ray."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import math
import time
import warnings
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ray_adascale
from ray_adascale import (
    AdaScale,
    AdaScaleConfig,
    LinearRule,
    LocalBackend,
    Recipe,
    Run,
    UnscaledRule,
    checkpoint,
    load_weights,
)
from ray_adascale._torch import is_dtensor
from ray_adascale.run.boundary.stage import ALWAYS, BoundaryFlags, StepReport
from ray_adascale.run.boundary.train_state import load_rng
from ray_adascale.run.observe import trace as observe_trace
from ray_adascale.run.observe.eta import EtaTracker
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.step import Listener, Step
from ray_adascale.run.observe.trace import read_trace

from ..host_reads import host_reads
from ..placement import here
from ..samples_of import WaitingBackend

# Advice on how far to scale, which toy data of 60 examples rightly gets; one test looks
# for it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale"
)


def dataset(length: int = 60, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    y = (
        x[:, 0]
        + 0.5 * x[:, 1]
        + 0.7 * torch.randn(length, generator=generator, dtype=torch.float64)
        > 0
    ).long()
    return TensorDataset(x.to(dtype), y)


def model(
    dtype: torch.dtype = torch.float32, *, dropout: float = 0.0, seed: int = 1
) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, 2),
    ).to(dtype)


def optimizer_of(
    net: nn.Module, kind: str, lr: float = 0.1, fused: bool | None = None
) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(
            net.parameters(), lr=lr / 5, weight_decay=0.1, fused=fused
        )
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, fused=fused)


def make_run(
    net: nn.Module,
    *,
    kind: str = "sgd",
    data: Any = None,
    lr: float = 0.1,
    gamma: float = 0.9,
    backend: LocalBackend | None = None,
    scheduler: bool = True,
    fused: bool | None = None,
    **settings: Any,
) -> Run:
    optimizer = optimizer_of(net, kind, lr, fused)
    schedule = (
        torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma) if scheduler else None
    )
    extra = {
        key: settings.pop(key)
        for key in ("evaluate", "recipe", "collate_fn")
        if key in settings
    }
    defaults: dict[str, Any] = {
        "base_batch_size": 4,
        "total_steps": 40,
        "scheduler_unit": "step" if scheduler else None,
    }
    if kind == "sgd" and fused:  # m^√r would need the gain on the host
        defaults["rule"] = "adascale"
    config = AdaScaleConfig(**(defaults | settings))
    with warnings.catch_warnings():
        if kind == "adamw":  # which is no SGD
            warnings.filterwarnings(
                "ignore",
                message="With rule='adascale' the averages|rule='adamscale' is exp",
            )
        return Run(
            net,
            optimizer,
            schedule,
            dataset() if data is None else data,
            config,
            backend=backend,
            **extra,
        )


def drive(run: Run, stop_after: int | None = None) -> list[dict[str, Any]]:
    """The user's loop; returns the metrics of each optimizer step."""
    rows = []
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            rows.append(dict(run.summary()))
            if len(rows) == stop_after:
                break
    return rows


def flat(module: nn.Module) -> Tensor:
    whole = [p.detach() for p in module.parameters()]
    whole = [p.full_tensor() if is_dtensor(p) else p for p in whole]  # type: ignore[operator]
    return torch.cat([p.reshape(-1).double() for p in whole])


# ---- reports -------------------------------------------------------------------------


class Recording(LocalBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reports: list[tuple[dict[str, Any], bool]] = []

    def report(self, outcome: StepReport, folder: Path | None) -> None:
        super().report(outcome, folder)
        self.reports.append((dict(outcome.metrics), folder is not None))


def test_reports_have_the_keys_and_the_last_one_carries_a_checkpoint(
    tmp_path: Path,
) -> None:
    backend = Recording(tmp_path)
    evaluate: Any = lambda _: {"accuracy": torch.tensor(0.5)}  # noqa: E731
    run = make_run(
        model(),
        backend=backend,
        evaluate=evaluate,
        per_worker_batch_size=8,
        accumulation=2,
    )
    drive(run)
    for metrics, _ in backend.reports:
        assert set(metrics) == {*METRICS, "accuracy"}
        assert all(type(value) in (int, float) for value in metrics.values())
    last, saved = backend.reports[-1]
    assert saved
    assert last["progress"] == pytest.approx(last["effective_steps"])
    assert last["efficiency"] == last["gain"] / last["scale"]
    assert (last["scale"], run.summary()["stopped"]) == (4.0, "total_steps reached")
    # A tenth of the run apart, at most one a step, the end included: exactly one after
    # each step that passes a multiple of 4.
    trace = read_trace(tmp_path)
    taus = [0.0, *(row["effective_steps"] for row in trace)]
    assert len(backend.reports) == sum(
        after // 4 > before // 4 for before, after in itertools.pairwise(taus)
    )
    assert [row["step"] for row in trace] == list(range(1, last["optimizer_steps"] + 1))
    assert set(METRICS) < set(trace[0])


def test_what_is_due_once_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Recording(device="cpu")
    run = make_run(
        model(),
        backend=backend,
        per_worker_batch_size=4,
        accumulation=2,
        total_steps=12,
    )
    asked = itertools.count(1)
    due = {3: BoundaryFlags.REPORT}  # at the third step boundary
    reporting = run.parts.boundary.reporting
    monkeypatch.setattr(reporting, "timer", ALWAYS)  # it is asked in each step
    monkeypatch.setattr(
        reporting, "flags", lambda: due.get(next(asked), BoundaryFlags.NONE)
    )
    steps = len(drive(run))
    assert steps > 4
    # the last is of the end
    assert [metrics["optimizer_steps"] for metrics, _ in backend.reports] == [3, steps]


def test_progress_is_the_sum_of_gains_under_every_rule() -> None:
    run = make_run(model(), per_worker_batch_size=8, accumulation=2, rule="linear")
    rows = drive(run)
    assert len(rows) == 10  # T / S
    assert rows[-1]["effective_steps"] == 40
    assert rows[-1]["progress"] == pytest.approx(sum(row["gain"] for row in rows))
    assert rows[-1]["progress"] < 40


@pytest.mark.parametrize(
    ("rule", "steps"),
    [(UnscaledRule(steps=25), 25), (LinearRule(steps=13), 13), ("sqrt", 10)],
)
def test_other_rules_take_the_steps_that_their_clock_says(
    rule: Any, steps: int
) -> None:
    assert (
        len(
            drive(make_run(model(), per_worker_batch_size=8, accumulation=2, rule=rule))
        )
        == steps
    )


@pytest.mark.parametrize(("every", "at"), [(39, [0, 39, 40]), (40, [0, 40])])
def test_it_evaluates_at_the_end_however_recent_the_evaluation_before_is(
    every: float, at: list[int]
) -> None:
    evaluated: list[float] = []

    def evaluate(net: nn.Module) -> dict[str, float]:
        evaluated.append(run.effective_steps)
        return {"accuracy": 0.5}

    # S = 1: τ counts the steps
    run = make_run(model(), evaluate=evaluate, evaluate_every=every)
    drive(run)
    assert evaluated == at


def test_a_loop_may_evaluate_by_itself() -> None:
    backend = Recording()
    run = make_run(model(), backend=backend, evaluate_every=10, report_every_s=1e-9)
    asked = []
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step(aux=torch.tensor(2.5)) and run.evaluate_due:
            asked.append(run.effective_steps)
            run.record(accuracy=run.effective_steps)
    assert asked == [10, 20, 30, 40]
    assert backend.reports[-1][0]["accuracy"] == 40
    assert backend.reports[-1][0]["aux"] == 2.5


def _speed() -> list[float]:
    """The speed that each of four steps shows, on a clock that goes on by a second a
    step.
    """
    now = [100.0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: now[0])
        run = make_run(model(), per_worker_batch_size=8, accumulation=2)
        speeds = []
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            now[0] += 0.5
            if run.step():
                speeds.append(run.summary()["examples_per_s"])
            if len(speeds) == 4:
                break
        return speeds


def test_the_speed_is_that_of_all_workers(pool: Any) -> None:
    assert pool(2).run(_speed) == [[32.0] * 4] * 2


def _summed() -> dict[str, float]:
    run = make_run(model(), total_steps=5)
    rank = run.backend.rank
    found = run.sum(seen=10 + rank, correct=torch.tensor([3.5]) * (rank + 1))
    # The order of names is each worker's own.
    swapped = run.sum(a=1.0, b=2.0) if rank else run.sum(b=20.0, a=10.0)
    return {**found, **swapped}


@pytest.mark.also_simulated
def test_numbers_are_summed_over_workers(pool: Any) -> None:
    assert (
        pool(2).run(_summed)
        == [{"seen": 21.0, "correct": 10.5, "a": 11.0, "b": 22.0}] * 2
    )
    run = make_run(model())
    assert run.sum(seen=10, correct=torch.tensor(3.5)) == {"seen": 10.0, "correct": 3.5}
    assert run.sum() == {}
    with pytest.raises(TypeError, match="Invalid seen: a tensor of 2 elements"):
        run.sum(seen=torch.ones(2))
    with pytest.raises(TypeError, match="Invalid seen: a str"):
        run.sum(seen="10")  # type: ignore[arg-type]


@pytest.mark.parametrize("fused", [None, True])
def test_a_warning_says_once_when_more_workers_buy_little(fused: bool | None) -> None:
    data = TensorDataset(
        torch.ones(64, 6) + 0.01 * torch.randn(64, 6), torch.zeros(64, dtype=torch.long)
    )
    run = make_run(
        model(),
        data=data,
        per_worker_batch_size=16,
        accumulation=2,
        lr=1e-4,
        scheduler=False,
        fused=fused,
    )
    told: list[float] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()
            told += [run.optimizer.known_effective_steps] * (len(said) - len(told))
    assert ["noise scale" in str(w.message) for w in said] == [True]
    assert said[0].filename == __file__  # the user's own loop
    assert told[0] >= 3 * 0.05 * 40  # three windows


def test_a_schedule_of_another_length_and_a_base_batch_beyond_the_dataset_are_warned_of_at_the_users_line() -> (
    None
):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    config = AdaScaleConfig(base_batch_size=64, total_steps=3000, scheduler_unit="step")
    with pytest.warns(
        UserWarning, match=r"and the run has 3000 steps|is larger than"
    ) as told:
        Run(net, optimizer, cosine, dataset(60), config)
    assert [w.filename for w in told] == [__file__] * 2
    assert "at 600 steps, and the run has 3000" in str(told[0].message)
    assert "base batch of 64 is larger than the dataset of 60" in str(told[1].message)


def test_a_schedule_that_falls_below_zero_is_warned_of() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 1 - call / 30)
    config = AdaScaleConfig(base_batch_size=4, total_steps=40, scheduler_unit="step")
    with pytest.warns(
        UserWarning, match=r"The learning rate falls to -0\.03.*End the schedule at 0"
    ):
        Run(net, optimizer, falling, dataset(60), config)
    unknown = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda call: math.nan if call > 30 else 1.0
    )
    with pytest.warns(UserWarning, match=r"The learning rate is NaN in steps"):
        Run(net, optimizer, unknown, dataset(60), config)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_schedule_that_is_zero_everywhere_is_warned_of(groups: int) -> None:
    net = model()
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(
        [{"params": parameters[i::groups], "lr": 0.1} for i in range(groups)]
    )
    config = AdaScaleConfig(base_batch_size=4, total_steps=40, scheduler_unit="step")
    endless = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: call / math.inf)
    with pytest.warns(
        UserWarning, match=r"zero in all steps.*estimated_stepping_batches.*T = 40 in"
    ) as told:
        Run(net, optimizer, endless, dataset(60), config)
    assert len(told) == 1


def test_a_frozen_group_beside_one_that_trains_is_not_warned_of() -> None:
    net = model()
    first, *others = net.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others}])
    optimizer.param_groups[1]["lr"] = 0.1
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 1.0)
    config = AdaScaleConfig(base_batch_size=4, total_steps=40, scheduler_unit="step")
    Run(net, optimizer, constant, dataset(60), config)


# ---- gradients that are not finite ---------------------------------------------------


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_one_bad_batch_is_skipped_and_many_end_the_run(
    accumulation: int, fused: bool | None
) -> None:
    net = model()
    before: Tensor | None = None
    steps = 0
    run = make_run(net, fused=fused, per_worker_batch_size=4, accumulation=accumulation)

    def loop() -> None:
        nonlocal before, steps
        for x, y in run:
            before = flat(net) if steps == 4 and before is None else before
            run.backward(
                F.cross_entropy(run.model(x), y)
                * (math.nan if steps == 2 or steps >= 4 else 1.0)
            )
            steps += run.step()
            assert run.optimizer.steps == {0: 0, 1: 1, 2: 2, 3: 2}.get(steps, 3)

    many = pytest.raises(
        FloatingPointError,
        match=r"50 optimizer steps in a row, so effective_steps stays at \d\.\d of 40",
    )
    with (
        pytest.warns(
            UserWarning, match=r"Step 3 was skipped, .* not finite \(loss nan\)"
        ) as caught,
        many,
    ):
        loop()
    # The host reads a fused step after the run has counted it.
    counted = 51 if fused else 50
    assert run.summary()["skipped_steps"] == counted
    assert (
        len([warning for warning in caught if "was skipped" in str(warning.message)])
        == 1
    )
    assert before is not None
    assert torch.equal(flat(net), before)


# ---- a fused optimizer: the host reads a step behind ---------------------------------


def _run_to_the_end(
    folder: str, fused: bool | None, **settings: Any
) -> tuple[list[float], list[float], int]:
    """Final weights, τ at each evaluation, and the boundaries at which the host had
    not read the step.
    """
    evaluated: list[float] = []
    net = model(torch.float64)

    def evaluate(_: nn.Module) -> dict[str, float]:
        evaluated.append(run.effective_steps)
        return {"seen": float(len(evaluated))}

    backend = LocalBackend(folder, device=here())
    data = dataset(dtype=torch.float64)
    run = make_run(
        net,
        data=data,
        backend=backend,
        evaluate=evaluate,
        total_steps=150,
        evaluate_every=50,
        lr=0.05,
        fused=fused,
        **settings,
    )
    behind = 0
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        behind += run.at_boundary and not run.optimizer.last_step_known
    return flat(run.module).tolist(), evaluated, behind


def _compare_fused(
    folder: Path, outcomes: list[tuple[list[float], list[float], int]]
) -> None:
    (weights, evaluated, behind), (fused_weights, fused_evaluated, fused_behind) = (
        outcomes
    )
    np.testing.assert_allclose(fused_weights, weights, rtol=1e-5)
    np.testing.assert_allclose(fused_evaluated, evaluated, rtol=1e-6)
    rows, fused_rows = (read_trace(folder / name) for name in ("False", "True"))
    assert len(rows) == len(fused_rows)
    assert behind == 0
    assert fused_behind > len(rows) / 2
    for row, fused_row in zip(rows, fused_rows, strict=True):
        del row["examples_per_s"], fused_row["examples_per_s"]
        for key in ("rule", "optimizer", "untrained"):
            assert row.pop(key, None) == fused_row.pop(key, None)
        # μ² may be near zero
        assert fused_row == pytest.approx(row, rel=1e-3, nan_ok=True)


@pytest.mark.also_simulated
@pytest.mark.parametrize(
    ("kind", "sharding", "settings"),
    [
        ("sgd", "none", {"rule": "adascale"}),
        # In measured steps m^√r and AdamW's betas need the gain on the host.
        ("sgd", "none", {"rule": "auto", "measure_every": 4}),
        ("adamw", "zero2", {"measure_every": 4}),
    ],
)
def test_a_fused_run_on_two_workers_is_the_same_run(
    pool: Any, tmp_path: Path, kind: str, sharding: str, settings: dict[str, Any]
) -> None:
    outcomes = []
    for fused in (False, True):
        both = pool(2).run(
            _run_to_the_end,
            str(tmp_path / str(fused)),
            fused,
            per_worker_batch_size=4,
            sharding=sharding,
            kind=kind,
            **settings,
        )
        assert both[0] == both[1]
        outcomes.append(both[0])
    _compare_fused(tmp_path, outcomes)


def test_the_host_reads_what_has_arrived_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run(
        model(), per_worker_batch_size=8, accumulation=2, total_steps=200, fused=True
    )
    for number, (x, y) in enumerate(run):
        if number not in (40, 41):  # both passes of the 21st step
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()
            continue
        with host_reads(monkeypatch) as found:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()
        # of the step before: r and the loss, in one copy
        assert found == ([] if number == 40 else ["read"])
        assert not run.optimizer.last_step_known
        if number == 41:
            break
    progress, tau = run.progress, run.effective_steps  # asking waits
    assert progress == pytest.approx(tau)
    assert run.summary()["optimizer_steps"] == 21
    assert tau > 20  # beyond the first tenth of the run


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_is_dropped_is_gone_at_once(accumulation: int) -> None:
    run = make_run(
        model(), per_worker_batch_size=4, accumulation=accumulation, total_steps=5
    )
    drive(run)
    gone = [weakref.ref(it) for it in (run, run.optimizer, run.module)]
    gc.collect()
    gc.disable()
    try:
        del run
        assert [ref() is None for ref in gone] == [True] * 3
    finally:
        gc.enable()


def test_what_is_observed_late_has_the_metrics_of_its_own_step() -> None:
    seen: list[tuple[int, Any]] = []

    class Watched(LocalBackend, Listener):
        def listeners(self, tracker: EtaTracker) -> list[Listener]:
            return [self]

        def after_step(self, step: Step) -> None:
            seen.append((step.metrics["optimizer_steps"], step.metrics["mine"]))

    settings: dict[str, Any] = {
        "per_worker_batch_size": 4,
        "accumulation": 2,
        "total_steps": 40,
        "fused": True,
    }
    run = make_run(model(), backend=Watched(device="cpu"), **settings)
    steps = 0
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step(mine=float(steps + 1))
    assert seen == [(step, float(step)) for step in range(1, steps + 1)]


def test_background_checkpoints_of_a_fused_run(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, device="cpu", keep=1000)
    settings: dict[str, Any] = {
        "per_worker_batch_size": 8,
        "accumulation": 2,
        "total_steps": 200,
        "fused": True,
    }
    run = make_run(model(), backend=backend, checkpoint_every_s=1e-9, **settings)
    steps = 0
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step()
        deadline = time.monotonic() + 10
        while (
            run.parts.boundary.checkpointing.saver.busy and time.monotonic() < deadline
        ):
            time.sleep(0.001)  # until it is written, however busy the machine is
    written = [
        path for path in tmp_path.glob("checkpoint_*") if checkpoint.is_sealed(path)
    ]
    assert len(written) > 3
    for path in written:
        state = checkpoint.Saved(path).state
        assert state["iterations"] == int(path.name.removeprefix("checkpoint_"))
        assert state["progress"] == pytest.approx(state["effective_steps"])


# ---- checkpoints ---------------------------------------------------------------------


def _interrupted(
    folder: str | None, stop: int | None, **settings: Any
) -> tuple[Tensor, list[dict[str, Any]], float]:
    torch.manual_seed(7)
    net = model(dropout=0.2)
    backend = WaitingBackend(folder)
    if stop is not None:
        settings |= {"checkpoint_every_s": 1e-9}  # after every step
    run = make_run(net, backend=backend, total_steps=60, **settings)
    torch.manual_seed(
        100 + torch.distributed.get_rank()
        if torch.distributed.is_initialized()
        else 100
    )
    if run.state.attempt > 0:
        with backend.latest_checkpoint() as path:
            assert path is not None
            load_rng(
                checkpoint.Saved(path), backend.rank, backend.device
            )  # the seeding above is this test's; a resumed worker keeps the checkpoint's
    rows = drive(run, stop_after=stop)
    return flat(net), rows, run.effective_steps


def _same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return [{k: v for k, v in row.items() if k != "examples_per_s"} for row in a] == [
        {k: v for k, v in row.items() if k != "examples_per_s"} for row in b
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"per_worker_batch_size": 8, "accumulation": 2},
        {"per_worker_batch_size": 8, "accumulation": 2, "fused": True},
        {"kind": "adamw", "per_worker_batch_size": 8, "accumulation": 2},
        {"kind": "adamw", "per_worker_batch_size": 8, "accumulation": 2, "fused": True},
        {
            "kind": "adamw",
            "per_worker_batch_size": 8,
            "accumulation": 2,
            "rule": "adascale_memory",
        },
    ],
    ids=["base", "scaled", "fused", "adamw", "adamw-fused", "betas"],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    whole, rows, tau = _interrupted(None, None, **settings)
    _, first, _ = _interrupted(str(tmp_path), 6, **settings)
    _, second, _ = _interrupted(str(tmp_path), 4, **settings)
    resumed, third, end = _interrupted(str(tmp_path), None, **settings)
    assert torch.equal(resumed, whole)
    assert end == tau
    # The checkpoint is taken inside step(), so every step that returned is in it; of a
    # fused optimizer every second one.
    assert _same(first + second + third, rows)
    trace = read_trace(tmp_path)
    assert [row["step"] for row in trace] == list(range(1, len(rows) + 1))
    assert [row["attempt"] for row in trace][::4][:3] == [0, 0, 1]


def test_checkpoints_have_the_number_of_the_start_that_wrote_them(
    tmp_path: Path,
) -> None:
    """Also after a start that has written none, and one that lives on and writes one
    late.
    """

    def start() -> Run:
        return make_run(model(), backend=WaitingBackend(tmp_path))

    first, anew = start(), start()  # the first had no checkpoint yet
    for run, steps in ((first, 1), (anew, 4)):
        drive(run, stop_after=steps)
        run.save_checkpoint()
    cut_off, second = start(), start()
    for run, steps in ((second, 2), (cut_off, 3)):
        drive(run, stop_after=steps)
        run.save_checkpoint()
    found = checkpoint.in_run(tmp_path)
    assert [
        (checkpoint.Saved(path).state["attempt"], path.name[-1]) for path in found
    ] == [(2, "7"), (3, "6")]
    assert [row["attempt"] for row in read_trace(tmp_path)] == [1] * 4 + [3] * 2


def test_a_late_start_ends_where_a_later_one_has_a_checkpoint_of_its_step(
    tmp_path: Path,
) -> None:
    late, later = (
        make_run(model(), backend=LocalBackend(tmp_path, device="cpu"))
        for _ in range(2)
    )
    for run in (later, late):
        drive(run, stop_after=3)
    later.save_checkpoint()
    with pytest.raises(
        checkpoint.CheckpointError,
        match="of start 1 of the run, and this process is start 0",
    ):
        late.save_checkpoint()
    (kept,) = checkpoint.in_run(tmp_path)
    assert checkpoint.start_of(kept) == 1


def test_a_trace_is_thinned_over_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 20)  # of T = 60
    for stop in (25, 20, None):
        _interrupted(str(tmp_path), stop)
    rows = read_trace(tmp_path)
    assert [row["step"] for row in rows] == [
        1,
        *range(4, 25, 4),
        25,
        26,
        *range(28, 45, 4),
        45,
        46,
        *range(48, 61, 4),
    ]
    assert observe_trace.faults_of(rows) == []


def _two_workers(
    folder: str, stop: int | None, kind: str = "sgd"
) -> tuple[list[float], float]:
    weights, _, tau = _interrupted(folder, stop, per_worker_batch_size=8, kind=kind)
    return weights.tolist(), tau


@pytest.mark.also_simulated("adamw")
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_resumed_run_on_two_workers_is_exact_and_sharded(
    pool: Any, tmp_path: Path, kind: str
) -> None:
    whole = pool(2).run(_two_workers, str(tmp_path / "whole"), None, kind)
    pool(2).run(_two_workers, str(tmp_path / "cut"), 6, kind)
    momentum = json.loads(
        (
            sorted((tmp_path / "cut").glob("checkpoint_*"))[-1] / "tensors.json"
        ).read_text()
    )
    resumed = pool(2).run(_two_workers, str(tmp_path / "cut"), None, kind)
    assert resumed == whole
    assert resumed[0] == resumed[1]
    assert any(key.startswith("optim/") for key in json.dumps(momentum).split('"'))


def test_checkpoints_are_refused_between_passes(tmp_path: Path) -> None:
    run = make_run(
        model(), backend=LocalBackend(tmp_path), per_worker_batch_size=8, accumulation=2
    )
    for x, y in run:
        assert not run.at_boundary
        with pytest.raises(RuntimeError, match="step boundary"):
            run.save_checkpoint()
        run.backward(F.cross_entropy(run.model(x), y))
        with pytest.raises(RuntimeError, match="step boundary"):
            run.save_checkpoint()
        if not run.step():
            assert not run.at_boundary
            with pytest.raises(RuntimeError, match="step boundary"):
                run.save_checkpoint()
        else:
            break
    assert run.at_boundary
    assert run.save_checkpoint() is not None


def test_a_checkpoint_says_what_made_it(tmp_path: Path) -> None:
    recipe = _recipe_of(make_run(model()))
    drive(
        make_run(model(), backend=LocalBackend(tmp_path), **FROM_RECIPE, recipe=recipe)
    )
    (newest,) = tmp_path.glob("checkpoint_*")
    state = checkpoint.Saved(newest).state
    assert state["recipe"] == recipe.fingerprint
    assert state["versions"] == {
        "ray_adascale": ray_adascale.__version__,
        "torch": torch.__version__,
    }
    assert {"rng/0/python", "rng/0/numpy", "rng/0/torch"} <= set(
        checkpoint.Saved(newest).index
    )


@pytest.mark.filterwarnings("ignore:Batch norm")
def test_a_checkpoint_says_the_batch_that_the_run_has_come_to(tmp_path: Path) -> None:
    # Labels that have nothing to do with the inputs, at an LR that learns nothing:
    # noise, so the batch grows when it is first looked at.
    run = make_run(
        model(),
        backend=LocalBackend(tmp_path),
        lr=1e-6,
        per_worker_batch_size=8,
        target_efficiency=0.6,
        max_global_batch_size=48,
    )
    first = run.plan
    folder = run.save_checkpoint()
    assert folder is not None
    assert checkpoint.Saved(folder).state["plan"] == asdict(first)
    for x, _ in run:
        run.backward(F.cross_entropy(run.model(x), torch.arange(len(x)) % 2))
        if run.step() and run.plan != first:
            break
    folder = run.save_checkpoint()
    assert folder is not None
    said = checkpoint.Saved(folder).state["plan"]
    assert said == asdict(run.plan)
    assert said["global_batch_size"] > first.global_batch_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_batch_size": 2}, "base_batch_size is 2, was 4"),
        ({"total_steps": 50}, "total_steps is 50, was 40"),
        ({"lr": 0.2}, "curve differs.*accept_changes=True"),
        ({"seed": 9}, "seed"),
    ],
)
def test_a_changed_run_does_not_resume(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    _three_steps(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_run(model(), backend=LocalBackend(tmp_path), **change)


def _three_steps(folder: Path, **settings: Any) -> None:
    drive(
        make_run(
            model(), backend=WaitingBackend(folder), checkpoint_every_s=1e-9, **settings
        ),
        stop_after=3,
    )


def test_hooks_that_checkpoints_do_not_call_are_warned_of() -> None:
    net = model()
    optimizer = optimizer_of(net, "sgd")
    optimizer.register_state_dict_post_hook(lambda o, state: {**state, "mark": 1})
    config = AdaScaleConfig(base_batch_size=4, total_steps=4)
    with pytest.warns(
        UserWarning, match=r"SGD has hooks around its state dict.*extra_state="
    ):
        Run(net, optimizer, None, dataset(), config)


class _Counting(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": 0}


def test_entries_of_an_optimizers_state_dict_that_checkpoints_do_not_have_are_warned_of() -> (
    None
):
    net = model()
    config = AdaScaleConfig(base_batch_size=4, total_steps=4)
    with pytest.warns(
        UserWarning, match=r"_Counting has .*entries of its own in it.*extra_state="
    ):
        Run(net, _Counting(net.parameters(), lr=0.1), None, dataset(), config)


@pytest.mark.parametrize("part", ["model", "layer"])
@pytest.mark.parametrize("compiled_at_first", [True, False])
def test_a_run_resumes_and_is_read_with_and_without_compile(
    tmp_path: Path, part: str, compiled_at_first: bool
) -> None:
    def compiled(net: nn.Sequential) -> nn.Module:
        if part == "model":
            return torch.compile(net, backend="eager")  # type: ignore[return-value]
        net[0] = torch.compile(net[0], backend="eager")
        return net

    def run(compile_it: bool, folder: Path) -> tuple[nn.Module, Run]:
        net: nn.Module = model()
        net = compiled(net) if compile_it else net  # type: ignore[arg-type]
        return net, make_run(
            net, backend=WaitingBackend(folder), checkpoint_every_s=1e-9
        )

    whole, unbroken = run(False, tmp_path / "whole")
    drive(unbroken, stop_after=6)
    drive(run(compiled_at_first, tmp_path / "cut")[1], stop_after=3)
    net, resumed = run(not compiled_at_first, tmp_path / "cut")
    assert resumed.effective_steps == 3
    drive(resumed, stop_after=3)
    assert torch.equal(flat(net), flat(whole))
    momenta = [
        [s["momentum_buffer"] for s in one.optimizer.state.values()]
        for one in (unbroken, resumed)
    ]
    assert all(torch.equal(p, q) for p, q in zip(*momenta, strict=True))
    assert load_weights(tmp_path / "cut").keys() == model().state_dict().keys()


def test_an_accepted_change_is_told_once(tmp_path: Path) -> None:
    _three_steps(tmp_path)
    changed: dict[str, Any] = {"lr": 0.4, "gamma": 0.5, "total_steps": 5}
    with pytest.warns(
        UserWarning, match=r"curve differs.*Accepted.*effective step 3\.0"
    ) as told:
        run = make_run(
            model(), backend=LocalBackend(tmp_path), accept_changes=True, **changed
        )
    found = [
        warning.filename for warning in told if "curve differs" in str(warning.message)
    ]
    assert found == [__file__]  # the user's own line
    assert len(drive(run)) == 2
    # finds nothing changed
    assert drive(make_run(model(), backend=LocalBackend(tmp_path), **changed)) == []


def test_a_finished_run_that_is_given_more_steps_ends_with_a_checkpoint_again(
    tmp_path: Path,
) -> None:
    drive(make_run(model(), backend=LocalBackend(tmp_path)))
    backend = LocalBackend(tmp_path)
    with pytest.warns(UserWarning, match="total_steps is 50, was 40"):
        run = make_run(model(), backend=backend, total_steps=50, accept_changes=True)
    assert run.stopped is None
    assert len(drive(run)) == 10
    assert run.stopped == "total_steps reached"
    assert backend.metrics["effective_steps"] == 50
    assert (tmp_path / "checkpoint_0000000050" / "manifest.json").exists()
    assert [row["step"] for row in read_trace(tmp_path)] == list(range(1, 51))


def test_a_finished_run_does_nothing_when_started_again(tmp_path: Path) -> None:
    net = model()
    drive(make_run(net, backend=LocalBackend(tmp_path)))
    again = model(seed=3)
    backend = Recording(tmp_path)
    assert drive(make_run(again, backend=backend)) == []
    assert torch.equal(flat(again), flat(net))


# ---- data ----------------------------------------------------------------------------


def test_a_loader_may_give_the_length_of_an_epoch() -> None:
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)
    run = make_run(
        model(), data=loader, total_steps=None, total_epochs=4, scheduler_unit="epoch"
    )
    assert (run.total_steps, run.base_schedule.base_steps_per_epoch) == (60, 15)
    drive(run, stop_after=16)
    assert run.epoch == 1


# ---- mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"base_batch_size": 16, "per_worker_batch_size": 4},
            "the global batch of 4 .*smaller than the base batch of 16",
        ),
        ({"scheduler_unit": None}, "scheduler_unit"),
        ({"base_batch_size": None}, "base_batch_size"),
        ({"data": []}, "empty"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_run(model(), **settings)


def test_a_loop_within_a_loop_over_the_run_is_refused() -> None:
    run = make_run(model())
    with pytest.raises(RuntimeError, match="Another loop over the run, in this one"):
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()
            for inner, target in run:
                run.backward(F.cross_entropy(run.model(inner), target))
                run.step()
                break
    drive(run)  # the run itself is whole
    assert run.stopped == "total_steps reached"


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_left_of_the_loop_as_it_was_is_refused_with_what_to_remove(
    fused: bool | None, when: str
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    config = AdaScaleConfig(
        base_batch_size=4, accumulation=2, total_steps=40, scheduler_unit="step"
    )
    for leftover, words in (
        (
            optimizer.step,
            r"optimizer\.step\(\) was called in the loop.*Remove optimizer\.step",
        ),
        (scheduler.step, r"StepLR\.step\(\) was called beside.*Remove scheduler\.step"),
    ):
        run = Run(net, optimizer, scheduler, dataset(), config)
        with pytest.raises(RuntimeError, match=words):
            for x, y in run:
                run.backward(F.cross_entropy(run.model(x), y))
                if when == "before":
                    leftover()
                run.step()
                if when == "after":
                    leftover()
        assert run.state.iterations <= 3
    optimizer.step()  # outside a loop it is the user's own affair


def test_wrapped_optimizers_are_refused() -> None:
    net = model()
    wrapped = AdaScale(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="bare optimizer"):
        Run(
            net,
            wrapped,
            None,
            dataset(),
            AdaScaleConfig(base_batch_size=4, total_steps=5),
        )


def test_what_is_known_of_an_optimizer_that_is_not_sgd_is_said_and_it_runs() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    config = AdaScaleConfig(base_batch_size=4, total_steps=5, rule="adascale")
    with pytest.warns(
        UserWarning, match="the averages of AdamW reach over r times"
    ) as told:
        run = Run(net, optimizer, None, dataset(), config)
    assert [w.filename for w in told] == [__file__]
    assert len(drive(run)) == 5


FROM_RECIPE: dict[str, Any] = {
    "base_batch_size": None,
    "total_steps": None,
    "scheduler_unit": None,
}


def _recipe_of(run: Run) -> Recipe:
    return Recipe(
        hyperparameters={"lr": 0.1},
        base_batch_size=4,
        total_steps=40,
        base_steps_per_epoch=15.0,
        scheduler_unit="step",
        metric="loss",
        mode="min",
        score=0.1,
        lr_curve=list(map(list, run.base_schedule.lr_curve)),
        noise=[],
        seed=0,
        search={},
        workload="test",
        versions={},
        created="2026-11-21",
    )


def test_the_recipes_curve_is_enforced() -> None:
    settings: dict[str, Any] = FROM_RECIPE | {"recipe": _recipe_of(make_run(model()))}
    assert make_run(model(), **settings).total_steps == 40
    with pytest.raises(ValueError, match="not the recipe's"):
        make_run(model(), lr=0.1001, **settings)
    with pytest.raises(ValueError, match="the recipe says 40"):
        make_run(model(), **(settings | {"total_steps": 41}))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "evaluate returned a NoneType"),
        ({"accuracy": None}, "metric 'accuracy' of type NoneType"),
        (
            {"accuracy": torch.zeros(2)},
            "metric 'accuracy': a Tensor of 2 numbers. Must be one",
        ),
        (
            {"accuracy": np.zeros(0)},
            "metric 'accuracy': a ndarray of 0 numbers. Must be one",
        ),
        ({"lr": 0.5}, "metric 'lr': the run or Ray Tune reports it"),
        (
            {"loss": 0.5},
            "metric 'loss': the run or Ray Tune reports it. .*such as 'val_loss'",
        ),
    ],
)
def test_a_mistake_in_evaluate_shows_before_the_first_step(
    returned: Any, words: str
) -> None:
    run = make_run(model(), evaluate=lambda _: returned)
    with pytest.raises((TypeError, ValueError), match=words):
        drive(run)
    assert run.state.iterations == 0


def test_a_metric_that_is_nan_before_the_first_step_is_told() -> None:
    run = make_run(model(), evaluate=lambda _: {"accuracy": math.nan})
    with pytest.warns(UserWarning, match="evaluate returned NaN") as caught:
        drive(run)
    untrained, of_step = [str(each.message) for each in caught]
    assert "evaluate returned NaN for the untrained model: 'accuracy'" in untrained
    assert "evaluate returned NaN for 'accuracy' at effective step" in of_step


def test_the_evaluation_of_the_untrained_model_is_told_and_leaves_the_random_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ray_adascale")
    ends = []
    for evaluate in (
        None,
        lambda _: {
            "third": 1 / 3,
            "drawn": float(torch.rand(())) + np.random.rand(),  # noqa: NPY002
        },
    ):
        # else at the end alone
        run = make_run(model(dropout=0.5), evaluate=evaluate, evaluate_every=1e9)
        drive(run)
        ends.append(flat(run.module))
    assert torch.equal(*ends)
    assert (
        sum(
            line.startswith("The untrained model: third 0.3333, drawn ")
            for line in caplog.messages
        )
        == 1
    )


def test_the_untrained_models_metrics_are_in_the_first_row_of_the_trace_and_stay_there(
    tmp_path: Path,
) -> None:
    seen = iter(range(100))
    run = make_run(
        model(),
        evaluate=lambda _: {"calls": next(seen)},
        evaluate_every=10,
        backend=LocalBackend(tmp_path),
    )
    drive(run)
    rows = read_trace(tmp_path)
    assert rows[0]["untrained"] == {"calls": 0}
    assert all("untrained" not in row for row in rows[1:])
    assert next(row["calls"] for row in rows if "calls" in row) == 1


def test_a_metric_that_is_missing_from_the_last_evaluation_is_told() -> None:
    def evaluate(_: Any) -> dict[str, float]:
        if run.effective_steps >= 40:
            return {"error": 1.0}
        return {"error": 1.0, "accuracy": 0.5}

    run = make_run(model(), evaluate=evaluate, evaluate_every=10)
    with pytest.warns(
        UserWarning,
        match=r"returned no 'accuracy' this time, at effective step 40: .* earlier evaluation",
    ):
        drive(run)
    assert run.summary()["accuracy"] == 0.5


# ---- what a loop does by its step or its epoch ---------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("fused", [None, True])
def test_a_loop_does_at_scale_what_the_base_run_does_at_the_same_effective_steps(
    accumulation: int, fused: bool | None
) -> None:
    """Literally: in a base run ``step % 7 == 0`` with steps from 1, and the epoch of
    step t is (t · B0) // N.
    """
    run = make_run(model(), accumulation=accumulation, fused=fused)
    per_epoch = len(dataset()) / 4
    taus, due, epochs = [0.0], [], []
    assert not run.every(1)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if not run.step():
            assert not run.every(1e-3)
            continue
        due.append(run.every(7))
        epochs.append(run.base_epoch)
        taus.append(min(run.effective_steps, 40.0))
    passed = [math.floor(tau / 7) for tau in taus]
    assert due == [now > before for before, now in itertools.pairwise(passed)]
    assert sum(due) == 5
    if accumulation == 1:
        assert due == [step % 7 == 0 for step in range(1, 41)]
        assert epochs[:39] == [int(step // per_epoch) for step in range(1, 40)]
    assert epochs[-1] == run.effective_steps // per_epoch <= run.epoch


def test_every_needs_a_positive_number_and_base_epoch_a_length() -> None:
    run = make_run(model())
    for wrong in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="Must be positive: base steps"):
            run.every(wrong)
