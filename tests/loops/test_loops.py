"""The loops of ``kinds``: the ported one is the plain one at the base batch, has the
gain at scale, and resumes to the bit.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ray_adascale.checkpoint.rng import seed_everything

from .kinds import KINDS, SEED, Ported, T

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Muon", "ignore:.*larger than its noise"
)


def weights(models: list[nn.Module]) -> list[torch.Tensor]:
    return [
        tensor.clone() for model in models for tensor in model.state_dict().values()
    ]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_base_batch_the_ported_loop_is_the_plain_one_to_the_bit(
    kind: str,
) -> None:
    plain, ported = KINDS[kind]
    seed_everything(SEED)
    expected = weights(plain())
    seed_everything(SEED)
    run, models = ported(Ported({}))
    assert run.state.iterations == T
    assert equal(weights(models), expected)


def at_scale(kind: str, folder: str | None, stop: int | None) -> Any:
    seed_everything(SEED)
    settings = {
        "per_worker_batch_size": 8,
        "accumulation": 2,
        "sharding": "zero2" if kind != "mixup" else "none",
    }
    if kind == "muon":
        settings["sharding"] = "oss"
    with warnings.catch_warnings():
        # advice on optimizers and batches; this file compares numbers
        warnings.simplefilter("ignore")
        run, models = KINDS[kind][1](
            Ported(settings, None if folder is None else Path(folder), stop)
        )
    lr = run.schedule.lrs[0]
    return (
        [t.tolist() for t in weights(models)],
        run.effective_steps,
        run.state.iterations,
        run.gain,
        lr,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_four_times_the_batch_on_two_workers_has_a_gain_and_resumes_to_the_bit(
    pool: Any, kind: str, tmp_path: Path
) -> None:
    first, second = pool(2).run(at_scale, kind, None, None)
    assert first[1:] == second[1:]
    _, tau, steps, gain, _ = first
    assert T <= tau < T + 4
    assert T / 4 <= steps <= T
    assert 1 <= gain <= 4
    # its state is each worker's own, which extra_state does not hold
    if kind == "lstm":
        return
    pool(2).run(at_scale, kind, str(tmp_path), 3)
    assert pool(2).run(at_scale, kind, str(tmp_path), None)[0] == first


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_at_the_base_batch_is_exact(kind: str, tmp_path: Path) -> None:
    ported = KINDS[kind][1]
    seed_everything(SEED)
    _, whole = ported(Ported({}))
    seed_everything(SEED)
    ported(Ported({}, tmp_path, 7))
    seed_everything(SEED + 1)  # the generators come from the checkpoint
    _, again = ported(Ported({}, tmp_path))
    assert equal(weights(again), weights(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_few_lines_are_added_or_changed(kind: str) -> None:
    def statements(function: Any) -> list[str]:
        """The lines of a function, each statement on one, as no formatter wraps it."""
        source = textwrap.dedent(inspect.getsource(function))
        return ast.unparse(ast.parse(source)).splitlines()

    plain, ported = map(statements, KINDS[kind])
    added = [
        line
        for line in ndiff(plain, ported)
        if line.startswith("+ ") and line.strip("+ ")
    ]
    # of this file: where to stop, what to return
    harness = ("how.", "def ", "break", "return")
    assert (
        len([line for line in added if not any(word in line for word in harness)]) <= 10
    ), added
