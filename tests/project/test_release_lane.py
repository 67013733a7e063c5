"""Tests of kept studies run where the files that they are about have changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest, release


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept" / "deep").mkdir(parents=True)
    (tmp_path / "kept" / "deep" / "runs.jsonl").write_text("{}\n")
    (tmp_path / "test_study.py").write_text("")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "DIGESTS", tmp_path / "release.json")
    monkeypatch.setattr(release.digest, "__defaults__", (tmp_path,))
    return tmp_path


def item(root: Path, **markers: tuple[str, ...]) -> Any:
    """A test with these markers and their arguments."""
    found = {name: SimpleNamespace(args=args) for name, args in markers.items()}
    return SimpleNamespace(path=root / "test_study.py", get_closest_marker=found.get)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "kept" / "deep" / "runs.jsonl").write_text("{} \n"),
        lambda root: (root / "kept" / "new.jsonl").write_text(""),
        lambda root: (root / "kept" / "deep" / "runs.jsonl").rename(
            root / "kept" / "deep" / "other.jsonl"
        ),
        lambda root: (root / "test_study.py").write_text("pass\n"),
    ],
    ids=["content", "a new file", "a name", "the test"],
)
def test_a_study_is_tested_with_the_pages_until_its_files_are_those_of_a_release(
    root: Path, change: Any
) -> None:
    watched = ("kept/**/*",)
    study = item(root, release=watched)
    slow = item(root, release=watched, slow=())

    def lanes(of: Any) -> list[str]:
        release.changed.cache_clear()
        names = ("release", "docs", "plain", "pool")
        return [lane for lane in names if conftest._is_of(lane, of)]

    assert lanes(study) == ["release", "docs"]
    release.keep({study.path: watched})
    assert lanes(study) == ["release"]
    change(root)
    assert lanes(study) == ["release", "docs"]
    assert lanes(slow) == ["release"]


@pytest.mark.parametrize(
    "name",
    [
        "public_data",
        "transfer",
        "carry_over",
        "search_cost",
        "forecast_study",
        "gpu_transfer",
        "pictures",
        "benchmarks",
        "client_examples",
    ],
)
def test_tests_of_scripts_and_kept_studies_are_of_this_lane(name: str) -> None:
    path = Path(__file__).with_name(f"test_{name}.py")
    lanes = [
        lane for lane in ("ray", "pool", "plain") if conftest._may_hold(path, lane)
    ]
    assert lanes == []
    assert conftest._may_hold(path, "release")


@pytest.mark.parametrize(
    ("status", "changes", "kept"),
    [
        (0, {}, True),
        (1, {}, False),
        (0, {"collectonly": True}, False),
        (0, {"keyword": "one"}, False),
        (0, {"markexpr": "not slow"}, False),
        (0, {"lane": "docs"}, False),
    ],
)
def test_a_digest_is_kept_only_if_all_tests_have_run_and_passed(
    root: Path, status: int, changes: dict[str, Any], kept: bool
) -> None:
    given = {"lane": "release", "keyword": "", "markexpr": "", "collectonly": False}
    option = SimpleNamespace(**(given | changes))
    session: Any = SimpleNamespace(
        config=SimpleNamespace(option=option),
        items=[item(root, release=("kept/**/*",))],
    )
    conftest.pytest_sessionfinish(session, status)
    assert (release.kept() != {}) == kept
