"""What assemble() builds: stages and listeners in their order, fresh and from a
checkpoint.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_adascale import AdaScaleConfig, LocalBackend, Run, forecast_recipe
from ray_adascale.analysis.describe import describe
from ray_adascale.analysis.report import write_report
from ray_adascale.run.assemble import RunParts, assemble
from ray_adascale.run.boundary.batch import ChooseBatch
from ray_adascale.run.boundary.checkpointing import Checkpointing
from ray_adascale.run.boundary.evaluation import Evaluation
from ray_adascale.run.boundary.notices import Interrupt, Preemption
from ray_adascale.run.boundary.reporting import Reporting
from ray_adascale.run.observe.advice import NoiseWarning
from ray_adascale.run.observe.eta import EtaTracker
from ray_adascale.run.observe.step import Listener
from ray_adascale.run.observe.trace import Trace, read_trace
from ray_adascale.workload import RunInputs

from ..samples_of import recipe
from .test_loop import dataset, model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale"
)

STAGES = [ChooseBatch, Interrupt, Evaluation, Preemption, Checkpointing, Reporting]


class Watched(LocalBackend):
    """A backend with a listener."""

    class Mine(Listener):
        def __init__(self, tracker: EtaTracker) -> None:
            self.tracker = tracker

    def listeners(self, tracker: EtaTracker) -> Sequence[Listener]:
        return [self.Mine(tracker)]


def built(
    backend: LocalBackend | None = None,
    *,
    evaluate: Any = None,
    kind: Any = torch.optim.SGD,
    **settings: Any,
) -> RunParts:
    net = model()
    defaults: dict[str, Any] = {"base_batch_size": 4, "total_steps": 40}
    optimizer = kind(net.parameters(), lr=0.01)
    return assemble(
        RunInputs(
            model=net, optimizer=optimizer, train_dataset=dataset(), evaluate=evaluate
        ),
        AdaScaleConfig(**(defaults | settings)),
        recipe=None,
        backend=LocalBackend(device="cpu") if backend is None else backend,
    )


def kinds(objects: Sequence[object]) -> list[type]:
    return [type(each) for each in objects]


def test_the_rule_that_was_chosen_stands_wherever_a_run_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, net = tmp_path / "run", model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    config = AdaScaleConfig(base_batch_size=4, total_steps=12, accumulation=2)
    with caplog.at_level(logging.INFO, logger="ray_adascale"):
        run = Run(
            net,
            optimizer,
            None,
            dataset(),
            config,
            backend=LocalBackend(folder, device="cpu"),
        )
    assert run.config.rule == "adascale_memory"
    assert "T = 12 effective steps; rule adascale_memory." in caplog.text
    for x, y in run:
        run.backward(torch.nn.functional.cross_entropy(run.model(x), y))
        run.step()
    rows = read_trace(folder)
    assert {row["rule"] for row in rows} == {"adascale_memory"}
    assert [row.get("optimizer") for row in rows] == [
        "AdamW",
        *[None] * (len(rows) - 1),
    ]
    checkpoint = max(folder.glob("checkpoint_*"))
    assert all(
        "rule         adascale_memory" in describe(path)[0]
        for path in (folder, checkpoint)
    )
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert '<td data-label="rule" class="text">adascale_memory</td>' in page
    of = recipe(
        [(t, 4.0, 1.0) for t in range(0, 100, 10)], search={"optimizer_class": "AdamW"}
    )
    assert [forecast_recipe(each).rule for each in (of, recipe([(0, 4.0, 1.0)]))] == [
        "adascale_memory",
        "adascale",
    ]
    with (
        pytest.warns(UserWarning, match="the averages of AdamW reach over"),
        pytest.raises(
            ValueError,
            match=r"rule is 'adascale', was 'adascale_memory'.*accept_changes",
        ),
    ):
        built(
            LocalBackend(folder, device="cpu"),
            kind=torch.optim.AdamW,
            rule="adascale",
            total_steps=12,
        )


ADAPTIVE: dict[str, Any] = {"target_efficiency": 0.5, "max_global_batch_size": 32}


def test_stages_are_in_their_order_and_the_batch_is_chosen_first() -> None:
    parts = built()
    assert kinds(parts.boundary.stages) == STAGES
    assert parts.boundary.stages[2] is parts.boundary.evaluation
    assert parts.boundary.stages[4:] == (
        parts.boundary.checkpointing,
        parts.boundary.reporting,
    )
    assert kinds(built(**ADAPTIVE).boundary.stages) == STAGES


def test_a_given_batch_above_an_epoch_is_refused_at_once_where_it_would_be_dropped() -> (
    None
):
    given: dict[str, Any] = {"batch_schedule": "0:4,50%:64"}  # of 60 examples
    with pytest.raises(
        ValueError,
        match=r"batch_schedule='0:4,50%:64'.*drop_last=True.*64 examples, and an epoch has 60",
    ):
        built(drop_last=True, **given)
    assert built(**given).plan.global_batch_size == 4
    assert (
        built(drop_last=True, max_global_batch_size=60, **given).plan.global_batch_size
        == 4
    )


def test_listeners_that_add_to_a_step_come_before_those_that_write_it(
    tmp_path: Path,
) -> None:
    assert kinds(built().listeners) == [NoiseWarning, EtaTracker]  # no folder, no trace
    with_trace = [NoiseWarning, EtaTracker, Trace, Watched.Mine]
    fixed = built(Watched(tmp_path, device="cpu")).listeners
    assert kinds(fixed) == with_trace
    assert fixed[3].tracker is fixed[1]  # type: ignore[attr-defined]
    adaptive = built(Watched(tmp_path, device="cpu"), **ADAPTIVE).listeners
    assert kinds(adaptive) == with_trace[1:]  # its batch is never larger than wanted


def _beside_rank_0(folder: str) -> tuple[list[str], list[str], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = built(
            Watched(folder, device="cpu"),
            base_batch_size=64,
            per_worker_batch_size=64,
            elastic=True,
        )
    doubts = sum("larger than the dataset" in str(w.message) for w in caught)
    return (
        [kind.__name__ for kind in kinds(parts.listeners)],
        [kind.__name__ for kind in kinds(parts.boundary.stages)],
        doubts,
    )


def test_workers_beside_rank_0_have_the_stages_and_no_listeners(
    pool: Any, tmp_path: Path
) -> None:
    first, second = pool(2).run(_beside_rank_0, str(tmp_path))
    assert len(first[0]) == 4
    assert second[0] == []
    assert first[1] == second[1] == [stage.__name__ for stage in STAGES]
    assert (first[2], second[2]) == (1, 0)  # rank 0 warns of doubts


def _groups_of_checkpoints(backends: str, name: str) -> str:
    """The backends of the group that writes checkpoints, if the default group had
    ``backends`` and this ``name``.
    """
    whole = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patched:
        asked = dist.get_backend_config
        patched.setattr(
            dist,
            "get_backend_config",
            lambda group=None: asked(group) if group else backends,
        )
        patched.setattr(dist, "get_backend", lambda group=None: name)
        group = built(
            sharding="none", per_worker_batch_size=2
        ).boundary.checkpointing.saver._group
    assert group is not whole
    return "default" if group is None else asked(group)


@pytest.mark.parametrize(
    ("backends", "name", "expected"),
    [
        ("cuda:nccl", "nccl", "cpu:gloo"),  # init_process_group("nccl")
        ("cuda:nccl", "undefined", "cpu:gloo"),  # init_process_group()
        ("cpu:gloo,cuda:nccl", "undefined", "default"),
        ("cpu:gloo", "gloo", "default"),
    ],
)
def test_checkpoints_have_a_group_for_tensors_on_the_cpu(
    pool: Any, backends: str, name: str, expected: str
) -> None:
    """A checkpoint in the background must not share NCCL's communicator with the
    steps.
    """
    for found in pool(2).run(_groups_of_checkpoints, backends, name):
        assert found.startswith(expected)
