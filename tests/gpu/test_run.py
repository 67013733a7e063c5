"""``Run`` in one process on a GPU: it trains as on the CPU, resumes, and with a
fused optimizer waits for nothing in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from .training import Case, agree, make_run, resumed, train

pytestmark = pytest.mark.gpu

CASES = {
    "sgd": Case(),
    "sgd-fused": Case(fused=True),
    "adamw": Case(optimizer="AdamW"),
    "adamw-fused": Case(optimizer="AdamW", fused=True),
    "clipped": Case(settings={"grad_clip": 0.5}),
    "clipped-fused": Case(fused=True, settings={"grad_clip": 0.5}),
    "bf16": Case(settings={"precision": "bf16"}),
    "bf16-fused": Case(fused=True, settings={"precision": "bf16"}),
    "fp16": Case(settings={"precision": "fp16"}),
    "fp16-fused": Case(fused=True, settings={"precision": "fp16"}),
}


@pytest.fixture(autouse=True)
def advice_is_no_error(recwarn: pytest.WarningsRecorder) -> None:
    """Let runs warn (of AdamW, of a small batch); this file compares numbers."""


@pytest.mark.parametrize("name", CASES)
def test_a_run_takes_the_cpus_steps(name: str) -> None:
    case = CASES[name]
    # Under autocast τ may reach T one step earlier or later: both runs stop before.
    stop = 12 if case.low_precision else None
    found = train(case, "cuda", stop_after=stop)
    assert found.device == "cuda:0"
    agree(found, train(case, "cpu", stop_after=stop), case)


@pytest.mark.parametrize(
    "name", ["sgd", "sgd-fused", "adamw-fused", "bf16-fused", "fp16", "fp16-fused"]
)
def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    whole, again = train(case, "cuda"), resumed(case, "cuda", str(tmp_path))
    # The same kernels on the same numbers. 1e-9 leaves room for ones that add in
    # another order each time.
    assert again.steps == whole.steps
    assert again.tau == pytest.approx(whole.tau, rel=1e-9)
    np.testing.assert_allclose(again.weights, whole.weights, rtol=1e-9, atol=1e-9)


def test_a_checkpoint_of_a_gpu_is_resumed_on_the_cpu(tmp_path: Path) -> None:
    case = CASES["sgd"]
    train(case, "cuda", str(tmp_path), stop_after=7)
    agree(train(case, "cpu", str(tmp_path)), train(case, "cpu"), case)


@pytest.fixture
def strict() -> Iterator[None]:
    """Leave torch's check for synchronizations off after the test."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "name", ["sgd-fused", "adamw-fused", "clipped-fused", "bf16-fused"]
)
def test_a_fused_step_of_a_run_waits_for_nothing(name: str, strict: None) -> None:
    run = make_run(CASES[name], "cuda")
    steps = 0
    for x, y in run:
        loss = F.cross_entropy(run.model(x), y)
        # From the fourth step on: pinned memory, momentum and workspaces exist.
        # Fetching a batch may wait, and so may the steps near the end of the run.
        if 3 <= steps < 8:
            torch.cuda.set_sync_debug_mode("error")
        run.backward(loss)
        steps += run.step()
        torch.cuda.set_sync_debug_mode("default")
        if steps == 8:
            break
    assert steps == 8


def test_nothing_waits_for_a_batch_of_loader_processes(strict: None) -> None:
    case = Case(fused=True, settings={"num_loader_workers": 2})
    run = make_run(case, "cuda")
    steps = 0
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step()
        # while the next batch is fetched, too
        torch.cuda.set_sync_debug_mode("error" if 3 <= steps < 8 else "default")
        if steps == 8:
            break
    assert steps == 8
    found = train(case, "cuda")
    assert found.weights == train(CASES["sgd-fused"], "cuda").weights


def test_the_check_for_synchronizations_finds_one(strict: None) -> None:
    loss = torch.ones(3, device="cuda").sum()
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchroniz"):
        loss.item()
