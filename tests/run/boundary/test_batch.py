"""Two passes in place of one, where one worker has a single gradient sample at S >
1.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from ..test_loop import dataset, drive, flat, make_run, model

pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale"
)

SETTINGS: dict[str, Any] = {
    "base_batch_size": 4,
    "per_worker_batch_size": 14,
    "total_steps": 30,
}


def told(made: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Return a result, and how often it was told that passes are split."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = made(*args, **kwargs)
    return result, sum("two passes of half the size" in str(w.message) for w in caught)


def test_one_pass_above_the_base_batch_is_made_as_two() -> None:
    ends = []
    for passes in (1, 2):
        net = model()  # with a batch norm
        settings = SETTINGS | {
            "per_worker_batch_size": 14 // passes,
            "accumulation": passes,
        }
        run, times = told(make_run, net, **settings)
        rows, later = told(drive, run)
        assert (times, later) == (2 - passes, 0)
        assert (run.plan.passes, run.plan.global_batch_size) == (2, 14)
        ends.append([*flat(net).tolist(), *(row["gain"] for row in rows), len(rows)])
    assert ends[0] == ends[1]
    assert 1 < rows[-1]["gain"] < 3.5


def test_data_in_batches_are_refused_with_the_line_to_change() -> None:
    loader = DataLoader(dataset(), batch_size=14)
    with pytest.raises(
        ValueError,
        match=r"accumulation=2, per_worker_batch_size=7\), with batches of 7 examples",
    ):
        make_run(model(), data=loader, **SETTINGS)


def test_an_iterable_that_is_batched_here_is_split() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = dataset()
            return (data[i] for i in range(len(data)))

    run, times = told(
        make_run, model(), data=Stream(), dataset_length=len(dataset()), **SETTINGS
    )
    assert (times, run.plan.passes) == (1, 2)
    assert len(next(iter(run))[0]) == 7
