"""Generators put back go on with the very draws that they would have made, through a
checkpoint as well.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ray_adascale.checkpoint.rng import (
    capture_rng,
    empty_rng,
    restore_rng,
    seed_everything,
    separate_streams,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw() -> list[Any]:
    """An odd number of normals from each generator: those that make them in pairs
    hold one back.
    """
    return [
        random.random(),
        *(random.gauss(0, 1) for _ in range(3)),
        random.getrandbits(70),
        *np.random.rand(5).tolist(),  # noqa: NPY002 (the global generator is what is captured)
        *np.random.randn(3).tolist(),  # noqa: NPY002
        *np.random.permutation(7).tolist(),  # noqa: NPY002
        *torch.rand(5).tolist(),
        *torch.randn(3).tolist(),
        *torch.randn(17).tolist(),
        *torch.randperm(7).tolist(),
        *torch.randn(3, device=DEVICE).tolist(),
    ]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002
    torch.manual_seed(value)


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_restored_generators_repeat_their_draws(draws: int) -> None:
    seed(3)
    for _ in range(draws):
        draw()
    state = capture_rng(DEVICE)
    first = draw()
    assert draw() != first
    restore_rng(state, DEVICE)
    assert draw() == first


def test_seed_everything_seeds_whatever_is_captured() -> None:
    seed_everything(5)
    seeded = capture_rng(DEVICE)
    draw()
    moved = capture_rng(DEVICE)
    for key in seeded:
        assert not torch.equal(moved[key], seeded[key]), key
    seed_everything(5)
    for key, value in capture_rng(DEVICE).items():
        # "python_gauss" may be NaN
        torch.testing.assert_close(value, seeded[key], rtol=0, atol=0, equal_nan=True)


def test_capture_moves_nothing_and_aliases_nothing() -> None:
    seed(4)
    expected = draw()
    seed(4)
    state = capture_rng(DEVICE)
    copies = {key: value.clone() for key, value in state.items()}
    assert draw() == expected
    assert all(
        torch.equal(state[key], copies[key]) for key in state if key != "python_gauss"
    )


def test_a_normal_that_is_not_held_back_is_not_made_up() -> None:
    seed(5)
    state = capture_rng(DEVICE)
    assert math.isnan(float(state["python_gauss"]))
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    restore_rng(state, DEVICE)
    assert random.getstate()[2] is None
    assert np.random.get_state()[3] == 0  # noqa: NPY002


def test_shapes_and_dtypes_do_not_depend_on_what_was_drawn() -> None:
    seed(9)
    shapes = []
    for _ in range(3):
        state = capture_rng(DEVICE)
        shapes.append(
            {
                key: (value.shape, value.dtype, value.device.type)
                for key, value in state.items()
            }
        )
        draw()
    assert shapes[0] == shapes[1] == shapes[2]
    assert shapes[0] == {
        key: (v.shape, v.dtype, v.device.type) for key, v in empty_rng(DEVICE).items()
    }
    assert {device for _, _, device in shapes[0].values()} == {"cpu"}


def test_a_state_without_a_gpu_leaves_one_alone() -> None:
    state = capture_rng(torch.device("cpu"))
    assert "cuda" not in state
    restore_rng(state, DEVICE)


def _streams_of_equal_seeds() -> tuple[list[Any], list[str]]:
    seed(0)
    changed = separate_streams(
        dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    )
    return [random.random(), float(np.random.rand()), float(torch.rand(()))], changed  # noqa: NPY002


def test_each_of_three_workers_with_equal_seeds_gets_streams_of_its_own(
    pool: Any,
) -> None:
    results = pool(3).run(_streams_of_equal_seeds)
    for draws in zip(*(drawn for drawn, _ in results), strict=True):
        assert len(set(draws)) == 3
    assert [sorted(changed) for _, changed in results] == [
        ["numpy", "python", "torch"]
    ] * 3


@pytest.mark.gpu
def test_only_the_given_gpus_generator_is_captured() -> None:
    assert "cuda" in capture_rng(torch.device("cuda"))
