from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from ray_adascale.data.head import examples_of

Pair = namedtuple("Pair", ["x", "rest"])


def test_a_nested_batch_is_cut_and_keeps_its_structure() -> None:
    shared, temperature = object(), torch.tensor(2.0)
    batch = {
        "pair": Pair(
            torch.arange(5), [np.arange(10).reshape(5, 2), "one text for all"]
        ),
        "ordered": OrderedDict(a=torch.arange(5.0), b=3),
        "counts": defaultdict(int, c=torch.arange(5)),
        "captions": ["a", "b", "c", "d", "e"],
        "size": (5, 5, 5, 5, 5),
        "shared": shared,
        "temperature": temperature,
    }
    for count in (3, 5, 9):
        found = examples_of(batch, count)
        assert found is not None
        part, rows = found[0], slice(0, count)
        assert found[1] == min(count, 5)
        assert isinstance(part["pair"], Pair)
        assert torch.equal(part["pair"].x, torch.arange(5)[rows])
        np.testing.assert_array_equal(
            part["pair"].rest[0], np.arange(10).reshape(5, 2)[rows]
        )
        assert part["pair"].rest[1] == "one text for all"
        assert isinstance(part["ordered"], OrderedDict)
        assert torch.equal(part["ordered"]["a"], torch.arange(5.0)[rows])
        assert isinstance(part["counts"], defaultdict)
        assert torch.equal(part["counts"]["c"], torch.arange(5)[rows])
        assert part["captions"] == list("abcde")[rows]
        assert part["size"] == (5, 5, 5, 5, 5)
        assert part["shared"] is shared
        assert part["temperature"] is temperature
    assert torch.equal(batch["counts"]["c"], torch.arange(5))  # type: ignore[index]  # the batch itself is untouched


@pytest.mark.parametrize(
    "batch",
    [
        None,
        [],
        "text",
        torch.tensor(1.0),
        torch.zeros(0, 2),
        (torch.zeros(4), torch.zeros(3)),
        {"a": torch.zeros(4), "b": [np.zeros(5)]},
        pack_sequence([torch.zeros(3), torch.zeros(2)]),
        (torch.zeros(2), pack_padded_sequence(torch.zeros(2, 1), torch.tensor([2]))),
    ],
)
def test_what_cannot_be_cut_has_no_first_examples(batch: Any) -> None:
    assert examples_of(batch, 2) is None
