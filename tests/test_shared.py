from collections.abc import Iterator
from contextlib import contextmanager

from ray_adascale._shared import shared


def test_a_change_lasts_from_the_first_that_needs_it_to_the_last() -> None:
    seen: list[str] = []

    @shared
    @contextmanager
    def change() -> Iterator[None]:
        seen.append("made")
        yield
        seen.append("undone")

    first, second = change(), change()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert seen == ["made"]
    second.__exit__(None, None, None)
    with change():
        pass
    assert seen == ["made", "undone"] * 2
