"""Several workers on GPUs: two gloo ranks on one GPU, one NCCL rank, and with two GPUs
two NCCL ranks, against the CPU.

All cases of one group run in the same processes, whose start takes longer than the
cases.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from .training import KINDS, Case, Outcome, agree, resumed, train, train_wrapped
from .workers import Jobs, run_jobs, value_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CASES = {
    f"{sharding}{'-fused' if fused else ''}": Case(
        fused=fused,
        settings={"sharding": sharding, "accumulation": passes, "grad_clip": clip},
    )
    for sharding in ("none", "oss", "zero2")
    for fused, passes, clip in ((False, 2, None), (True, 1, 1.0))
} | {
    "zero2-adamw": Case(optimizer="AdamW", fused=True, settings={"sharding": "zero2"}),
    "zero2-fp16": Case(settings={"sharding": "zero2", "precision": "fp16"}),
    "zero2-bf16": Case(fused=True, settings={"sharding": "zero2", "precision": "bf16"}),
}
NCCL_CASES = CASES | {
    "fsdp2": Case(settings={"sharding": "fsdp2"}),
    "fsdp2-adamw": Case(
        optimizer="AdamW", fused=True, settings={"sharding": "fsdp2", "accumulation": 1}
    ),
}
RESUMED = ("oss-fused", "zero2", "zero2-adamw")


def _quietly(fn: Any, *args: Any) -> Any:
    warnings.simplefilter("ignore")  # advice; this file compares numbers
    return fn(*args)


def _stop(case: Case) -> int | None:
    return 8 if case.low_precision else None


def _train(name: str, device: str | None) -> Outcome:
    case = NCCL_CASES[name]
    return _quietly(train, case, device, None, _stop(case))


def _resumed(name: str, device: str | None, folder: str) -> Outcome:
    return _quietly(resumed, NCCL_CASES[name], device, folder)


def _jobs(device: str | None, folder: Path, names: dict[str, Case]) -> Jobs:
    jobs: Jobs = {name: (_train, (name, device)) for name in names}
    return jobs | {
        f"resumed {name}": (_resumed, (name, device, str(folder / name)))
        for name in RESUMED
    }


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of two gloo workers on the CPU."""
    return run_jobs("gloo", 2, _jobs("cpu", tmp_path_factory.mktemp("cpu"), NCCL_CASES))


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of two gloo workers that share a GPU."""
    return run_jobs("gloo", 2, _jobs("cuda:0", tmp_path_factory.mktemp("gloo"), CASES))


@pytest.fixture(scope="module")
def on_two_gpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of two NCCL workers, which find their GPUs by themselves, after
    ``init_process_group()`` as in the docs.
    """
    return run_jobs(None, 2, _jobs(None, tmp_path_factory.mktemp("nccl"), NCCL_CASES))


def _compare(found: list[Any], expected: list[Any], name: str) -> None:
    for here, there in zip(value_of(found), value_of(expected), strict=True):
        agree(here, there, NCCL_CASES[name])
    if not NCCL_CASES[name].low_precision:
        # to the bit: the workers must take the same decisions
        assert found[0].tau == found[1].tau


@pytest.mark.parametrize("name", CASES)
def test_two_gloo_workers_share_a_gpu(
    name: str, on_one_gpu: dict[str, Any], on_cpu: dict[str, Any]
) -> None:
    _compare(on_one_gpu[name], on_cpu[name], name)


@pytest.mark.parametrize("name", RESUMED)
def test_two_gloo_workers_on_a_gpu_resume(
    name: str, on_one_gpu: dict[str, Any]
) -> None:
    _compare(on_one_gpu[f"resumed {name}"], on_one_gpu[name], name)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", NCCL_CASES)
def test_two_nccl_workers_have_a_gpu_each(
    name: str, on_two_gpus: dict[str, Any], on_cpu: dict[str, Any]
) -> None:
    assert [outcome.device for outcome in value_of(on_two_gpus[name])] == [
        "cuda:0",
        "cuda:1",
    ]
    _compare(on_two_gpus[name], on_cpu[name], name)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", RESUMED)
def test_two_nccl_workers_resume(name: str, on_two_gpus: dict[str, Any]) -> None:
    _compare(on_two_gpus[f"resumed {name}"], on_two_gpus[name], name)


# ---- one NCCL worker -----------------------------------------------------------------


def _wrapped(kind: str, device: str, fused: bool) -> Outcome:
    return _quietly(lambda: train_wrapped(kind, device, fused=fused))


WRAPPED = [
    (kind, fused)
    for kind in KINDS
    for fused in (False, True)
    if not (kind == "fsdp2" and fused)
]


def _wrapped_jobs(device: str) -> Jobs:
    return {
        f"{kind} {fused}": (_wrapped, (kind, device, fused)) for kind, fused in WRAPPED
    }


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The results of one NCCL worker on a GPU, and of one gloo worker on the CPU."""
    return run_jobs("nccl", 1, _wrapped_jobs("cuda:0")), run_jobs(
        "gloo", 1, _wrapped_jobs("cpu")
    )


@pytest.mark.parametrize(("kind", "fused"), WRAPPED)
def test_one_nccl_worker_trains_every_kind_as_on_the_cpu(
    kind: str, fused: bool, alone: Any
) -> None:
    found, expected = (value_of(results[f"{kind} {fused}"])[0] for results in alone)
    agree(found, expected, Case(fused=fused))
