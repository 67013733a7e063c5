"""How a run ends before T, and what it takes along into its checkpoints besides."""

from __future__ import annotations

import json
import logging
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ray_adascale import (
    AdaScaleConfig,
    EarlyStop,
    LocalBackend,
    Run,
    Workload,
    read_trace,
)
from ray_adascale.checkpoint.files import put_together, taken_apart
from ray_adascale.run.observe.eta import EtaTracker
from ray_adascale.run.observe.step import Listener, Step
from ray_adascale.workload import with_unit

from ..samples_of import WaitingBackend
from .test_loop import dataset, drive, flat, make_run, model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale"
)


class Asked(LocalBackend, Listener):
    """Somebody asks for the end once so many steps are taken."""

    def __init__(self, folder: Path, after: int, **options: Any) -> None:
        super().__init__(folder, device="cpu", **options)
        self.after = after
        self.steps = 0

    def listeners(self, tracker: EtaTracker) -> list[Listener]:
        return [self]

    def after_step(self, step: Step) -> None:
        self.steps = step.metrics["optimizer_steps"]

    @property
    def stop_requested(self) -> bool:
        return self.steps >= self.after


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_as_if_it_had_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations: list[int] = []
    whole = make_run(model(dropout=0.2), accumulation=2, per_worker_batch_size=4)
    drive(whole)
    run = make_run(
        model(dropout=0.2),
        accumulation=2,
        per_worker_batch_size=4,
        backend=Asked(tmp_path, 5),
        evaluate=lambda _: evaluations.append(1) or {},
        evaluate_every=1e9,
    )
    caplog.set_level(logging.INFO, "ray_adascale")
    drive(run)
    assert run.stopped == "interrupted"
    assert (
        f"Stopped after optimizer step {run.state.iterations}. Its checkpoint is being "
        "written." in caplog.messages
    )
    assert len(evaluations) == 1  # as it begins; whoever asked is waiting
    assert 5 <= run.state.iterations <= 6
    assert read_trace(tmp_path)
    assert (
        json.loads(max(tmp_path.glob("checkpoint_*/state.json")).read_text())["stopped"]
        is None
    )
    again = make_run(
        model(dropout=0.2, seed=9),
        accumulation=2,
        per_worker_batch_size=4,
        backend=LocalBackend(tmp_path),
    )
    assert again.stopped is None
    assert again.state.iterations == run.state.iterations
    drive(again)
    assert again.stopped == "total_steps reached"
    assert torch.equal(flat(again.module), flat(whole.module))


def _asked(folder: str, of_rank_1: int) -> tuple[Any, int]:
    after = 5 if dist.get_rank() == 0 else of_rank_1
    run = make_run(model(), backend=Asked(Path(folder), after), per_worker_batch_size=4)
    drive(run)
    return run.stopped, run.state.iterations


@pytest.mark.parametrize(
    "of_rank_1", [10**9, 0]
)  # what rank 1 is asked does not count: two flags add up to another one
def test_all_workers_stop_at_one_boundary(
    pool: Any, tmp_path: Path, of_rank_1: int
) -> None:
    one, two = pool(2).run(_asked, str(tmp_path), of_rank_1)
    assert one == two
    assert one[0] == "interrupted"
    assert 5 <= one[1] <= 7


def scores(*values: float) -> Any:
    """An evaluation that finds these one after the other."""
    left = iter(values)
    return lambda _: {"accuracy": next(left)}


STOP = EarlyStop(patience=8, metric="accuracy", mode="max")


def test_patience_is_counted_in_effective_steps_since_the_best(tmp_path: Path) -> None:
    # S = 1: an evaluation at τ = 4, 8, 12, ...; the best is that at 8, and at 16 there
    # were 8 without a better one.
    # the first of the untrained model
    evaluate = scores(0.1, 0.5, 0.7, math.nan, 0.7, 0.6, 0.9)
    run = make_run(
        model(),
        backend=LocalBackend(tmp_path),
        evaluate=evaluate,
        evaluate_every=4,
        early_stop=STOP,
    )
    with pytest.warns(UserWarning, match="NaN for 'accuracy' at effective step 12"):
        rows = drive(run)
    assert run.stopped == "no better accuracy than 0.7 for 8 effective steps"
    assert run.state.iterations == 17  # the boundary after the one that has shown it
    assert rows[-1]["accuracy"] == 0.7
    assert run.summary()["stopped"] == run.stopped
    saved = json.loads(max(tmp_path.glob("checkpoint_*/state.json")).read_text())
    assert (saved["iterations"], saved["best"], saved["best_at"]) == (17, 0.7, 8.0)

    again = make_run(
        model(seed=3),
        backend=LocalBackend(tmp_path),
        evaluate=scores(),
        evaluate_every=4,
        early_stop=STOP,
    )
    assert again.stopped == run.stopped
    assert drive(again) == []


def test_a_run_that_ends_since_its_metric_is_nan_tells_so() -> None:
    evaluate = scores(0.1, 0.5, math.nan, math.nan, math.nan)
    run = make_run(model(), evaluate=evaluate, evaluate_every=4, early_stop=STOP)
    with pytest.warns(UserWarning, match="NaN for 'accuracy' at effective step 8"):
        drive(run)
    assert run.stopped == (
        "no better accuracy than 0.5 for 8 effective steps; it is NaN now"
    )


def test_a_start_after_the_evaluation_that_ends_a_run_ends_it_where_the_run_would(
    tmp_path: Path,
) -> None:
    """A checkpoint at τ = 16, where 8 steps were without a better one: the run ends at
    the boundary after it, whether it was interrupted there or not.
    """
    evaluate = scores(0.1, 0.5, 0.7, 0.6, 0.7)
    settings: dict[str, Any] = {"evaluate_every": 4, "early_stop": STOP}
    run = make_run(
        model(), backend=LocalBackend(tmp_path), evaluate=evaluate, **settings
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        if run.state.iterations == 16:
            run.save_checkpoint()
            break
    assert run.stopped is None
    again = make_run(
        model(seed=3), backend=LocalBackend(tmp_path), evaluate=scores(), **settings
    )
    assert again.stopped is None
    assert len(drive(again)) == 1
    assert again.stopped == "no better accuracy than 0.7 for 8 effective steps"
    assert again.state.iterations == 17


def test_an_early_end_is_none_with_more_patience(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"evaluate_every": 4, "backend": LocalBackend(tmp_path)}
    run = make_run(
        model(), evaluate=scores(0.1, 0.5, 0.7, 0.6, 0.7), early_stop=STOP, **settings
    )
    drive(run)
    more = replace(STOP, patience=1000)
    again = make_run(model(), evaluate=scores(*[0.6] * 50), early_stop=more, **settings)
    assert again.stopped is None
    drive(again)
    assert again.stopped == "total_steps reached"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStop(patience=0), "patience=0"),
        (lambda: EarlyStop(patience=3, metric="x"), "Give both, or neither"),
        (lambda: EarlyStop(patience=3, metric="x", mode="up"), "mode='up'"),  # type: ignore[arg-type]
        (lambda: AdaScaleConfig(early_stop=5), "EarlyStop"),  # type: ignore[arg-type]
        (
            lambda: make_run(model(), early_stop=EarlyStop(patience=3)),
            "needs metric and mode",
        ),
        (
            lambda: make_run(
                model(), early_stop=EarlyStop(patience=3, metric="loss", mode="min")
            ),
            "the loss of one step is mostly noise",
        ),
        (
            lambda: drive(
                make_run(
                    model(),
                    evaluate=scores(0.5),
                    early_stop=EarlyStop(patience=3, metric="x", mode="min"),
                )
            ),
            "EarlyStop.metric='x'.: evaluate returned 'accuracy'",
        ),
    ],
)
def test_an_early_stop_that_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_workload_brings_its_metric() -> None:
    net = model()
    built = Workload(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        train_dataset=dataset(),
        loss_fn=lambda model, batch: model(batch[0]).mean(),
        evaluate=scores(0.5),
        metric="accuracy",
        mode="max",
    )
    config = with_unit(AdaScaleConfig(early_stop=EarlyStop(patience=8)), built)
    assert config.early_stop == STOP
    own = EarlyStop(patience=8, metric="other", mode="min")
    assert with_unit(AdaScaleConfig(early_stop=own), built).early_stop == own


# ---- extra state ---------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.state: Any = {"count": 0, "by": {"name": [1.5, None, "x"]}}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def with_average(
    folder: Path | None, seed: int, **more: Any
) -> tuple[Run, AveragedModel]:
    net = model(seed=seed)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    config = AdaScaleConfig(base_batch_size=4, total_steps=20, checkpoint_every_s=1e-9)
    run = Run(
        net,
        optimizer,
        None,
        dataset(),
        config,
        extra_state={"ema": average, **more},
        after_step=average.update_parameters,
        backend=WaitingBackend(folder, device="cpu"),
    )
    return run, average


def steps(run: Run, count: int) -> None:
    for taken, (x, y) in enumerate(run, start=1):
        run.backward(nn.functional.cross_entropy(run.model(x), y))
        run.step()  # which writes a checkpoint each time
        if taken == count:
            break


def test_extra_state_that_comes_or_goes_is_told(tmp_path: Path) -> None:
    first, _ = with_average(tmp_path, 1, counter=Counter())
    steps(first, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with_average(tmp_path, 1, more=Counter())
    # not this test's folder
    found = [warning for warning in said if "extra_state '" in str(warning.message)]
    assert {warning.filename for warning in found} == {__file__}  # the user's own line
    texts = [str(warning.message) for warning in found]
    assert len(texts) == 2
    assert "extra_state 'counter' is not loaded" in texts[0]
    assert "has no extra_state 'more'" in texts[1]


def test_nothing_is_pickled() -> None:
    state = {
        "a": [torch.ones(2), {"b": (1, 2.5, None, True, "x")}],
        "p": nn.Parameter(torch.zeros(1)),
    }
    tensors: dict[str, Any] = {}
    apart = taken_apart(state, "extra/me", tensors)
    assert set(tensors) == {"extra/me/a/0", "extra/me/p"}
    back = put_together(json.loads(json.dumps(apart)), tensors)
    assert back["a"][1] == {"b": [1, 2.5, None, True, "x"]}
    assert torch.equal(back["a"][0], torch.ones(2))
    for wrong, where in (
        ({"a": {1: 2}}, "Invalid key 1 in extra/me/a"),
        ({"a": {1, 2}}, "Invalid extra/me/a: a set"),
        ({"a": [object()]}, "Invalid extra/me/a/0: a object"),
        ({"__tensor__": 1}, "Invalid key '__tensor__'"),
        (
            {"a": torch.ones(1).as_subclass(type("Odd", (Tensor,), {}))},
            "Odd. Must be a plain tensor",
        ),
    ):
        with pytest.raises(TypeError, match=where):
            taken_apart(wrong, "extra/me", {})


# ---- logs and clips ------------------------------------------------------------------


def test_start_and_end_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray_adascale")
    run = make_run(model(), backend=LocalBackend(tmp_path), accumulation=2)
    drive(run)
    texts = [record.getMessage() for record in caplog.records]
    assert (
        texts[0]
        == "Started on 1 worker: batch 8 at base batch 4, so S = 2; T = 40 effective "
        "steps; rule adascale_memory."
    )
    assert any(
        text.startswith(
            f"Checkpoint of optimizer step {run.optimizer.steps}, effective step "
        )
        for text in texts
    )
    assert texts[-1].startswith("Ended: total_steps reached, at effective step 4")
    caplog.clear()
    make_run(model(), backend=LocalBackend(tmp_path), accumulation=2)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "has ended before: total_steps reached" in told
