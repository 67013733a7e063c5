"""The check of a count: what it takes, and what it says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ray_adascale._errors import SettingError, as_sentences, check_count


def test_integers_are_taken_as_python_ints() -> None:
    assert check_count("passes", 3) == 3
    found = check_count("passes", np.int64(3))
    assert (found, type(found)) == (3, int)
    found = check_count("total_steps", 40.0)  # as of a division
    assert (found, type(found)) == (40, int)
    assert check_count("workers", 0, minimum=0) == 0
    assert check_count("seed", -5, minimum=None) == -5


@pytest.mark.parametrize("value", [0, -1, True, 1.5, math.inf, "3", None])
def test_anything_else_is_refused_with_the_name_and_the_value(value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        check_count("passes", value)
    assert (
        str(caught.value)
        == f"Invalid passes={value!r}. Must be an integer of at least 1."
    )
    assert caught.value.settings == {"passes": value}


def test_without_a_minimum_the_type_alone_counts() -> None:
    with pytest.raises(
        SettingError, match=r"^Invalid seed=0\.5\. Must be an integer\.$"
    ):
        check_count("seed", 0.5, minimum=None)


def test_texts_become_sentences() -> None:
    said = as_sentences("RuntimeError: is 50", "", "In call 51 of x.", "It is long")
    assert said == "RuntimeError: is 50. In call 51 of x. It is long"
    assert as_sentences("KeyError: 'a'") == "KeyError: 'a'"
    assert as_sentences("Why?\n", "So:", "this") == "Why? So: this"
