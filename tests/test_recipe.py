from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_adascale.optim.schedule import EffectiveSchedule
from ray_adascale.recipe import NoiseProbe, Recipe, RecipeError, Repeat, curve_length

VERSION_1 = Path(__file__).parent / "samples" / "recipe_v1.json"
SETTINGS = {"precision": "bf16", "grad_clip": 1.0, "shuffle": True, "drop_last": False}
REPEATS = [
    Repeat(
        seed=7, score=0.9, noise=[NoiseProbe(effective_steps=20, sigma2=3.5, mu2=0.5)]
    ),
    Repeat(seed=8, score=0.96, noise=[]),
]


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "hyperparameters": {
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "layers": [64, 64],
            "schedule": None,
        },
        "base_batch_size": 32,
        "total_steps": 100,
        "base_steps_per_epoch": 28.5,
        "scheduler_unit": "epoch",
        "metric": "accuracy",
        "mode": "max",
        "score": 0.97,
        # ⌊99 / 28.5⌋ + 1 = 4
        "lr_curve": [[0.1, 0.1, 0.01, 0.001], [0.2, 0.2, 0.02, 0.002]],
        "noise": [
            NoiseProbe(effective_steps=0.0, sigma2=2.5, mu2=1.0),
            NoiseProbe(effective_steps=20, sigma2=3, mu2=-1),
        ],
        "seed": 0,
        "search": {
            "trials": 16,
            "failed": 1,
            "searcher": "random",
            "best_trial": "a1b2",
            "wall_seconds": 61.5,
        },
        "workload": "train.py:workload",
        "versions": {
            "ray_adascale": "0.1.0",
            "torch": "2.13.0",
            "ray": "2.60.0",
            "python": "3.11.7",
        },
        "created": "2026-01-31T12:00:00+00:00",
    } | changes


def recipe(**changes: Any) -> Recipe:
    return Recipe(**fields(**changes))


def saved(path: Path, **changes: Any) -> Path:
    recipe(**changes).save(path)
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


# --- Files ----------------------------------------------------------------------------


def test_the_committed_recipe_loads_for_ever_after(tmp_path: Path) -> None:
    made = recipe(repeats=REPEATS, settings=SETTINGS, momentum=0.95)
    loaded = Recipe.load(VERSION_1)
    assert loaded == made
    # checkpoints hold it, so it may never change either
    assert loaded.fingerprint == "d7fc38d57e4afeae"
    # repeats, settings and momentum are no part of the schedule
    assert recipe().fingerprint == loaded.fingerprint
    made.save(tmp_path / "recipe.json")
    assert (tmp_path / "recipe.json").read_text() == VERSION_1.read_text()


def test_repeats_say_what_the_score_owes_to_luck() -> None:
    # 0.9 and 0.96: mean 0.93, each 0.03 off it, so √(2·0.03²/1) = 0.0424. The search's
    # own 0.97 was picked for being best.
    assert recipe(repeats=REPEATS).repeat_scores == pytest.approx(
        (0.93, 0.0424264), rel=1e-5
    )
    assert recipe().repeat_scores is None
    assert recipe(repeats=REPEATS[:1]).repeat_scores is None
    text = recipe(repeats=REPEATS).describe()
    assert (
        "(max), of 16 trials; again 0.9 (seed 7), 0.96 (seed 8), mean 0.93, standard "
        "deviation 0.042" in text
    )
    confirmed = recipe(repeats=REPEATS[:1], search={"trials": 8}).describe()
    assert (
        "score        accuracy = 0.97 (max), of 8 trials; again 0.9 (seed 7)\n"
        in confirmed
    )


@pytest.mark.parametrize(
    ("repeats", "message"),
    [
        (
            [REPEATS[0], REPEATS[0]],
            r"Invalid repeats\[1\].seed=7. Must differ from the seeds",
        ),
        # the search's
        ([Repeat(seed=0, score=0.9, noise=[])], r"Invalid repeats\[0\].seed=0"),
        ([Repeat(seed=3, score=math.nan, noise=[])], r"Invalid repeats\[0\].score=nan"),
        ([{"seed": 3}], r"Invalid repeats\[0\]: .* Must be a Repeat"),
        (
            [
                Repeat(
                    seed=3,
                    score=1,
                    noise=[NoiseProbe(effective_steps=101, sigma2=1, mu2=1)],
                )
            ],
            r"Invalid repeats\[0\].noise\[0\].effective_steps=101",
        ),
    ],
)
def test_repeats_are_checked(repeats: list[Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(repeats=repeats)


FLOATS = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0]


@pytest.mark.parametrize("text", ['ε\u2028\x00"\\\n', "\U0001f600", "NaN", "null"])
@pytest.mark.parametrize(
    "changes",
    [{"score": value} for value in FLOATS] + [{"seed": 2**64, "repeats": REPEATS}],
)
def test_a_round_trip_changes_nothing(
    tmp_path: Path, text: str, changes: dict[str, Any]
) -> None:
    nested = {text: [text, None, True, 2**70, {"": [FLOATS, {}]}]}
    probes = [
        NoiseProbe(effective_steps=0.1 * i, sigma2=value, mu2=-value)
        for i, value in enumerate(FLOATS)
    ]
    own = {
        "metric": text,
        "workload": text,
        "hyperparameters": nested,
        "search": nested,
        "noise": probes,
        "settings": {},
    }
    original = recipe(**own | changes)
    original.save(tmp_path / "recipe.json")
    loaded = Recipe.load(tmp_path / "recipe.json")
    # floats exactly
    assert repr(dataclasses.asdict(loaded)) == repr(dataclasses.asdict(original))
    assert loaded.fingerprint == original.fingerprint
    assert isinstance(loaded.describe(), str)


@pytest.mark.parametrize("stage", ["os.fsync", "os.replace"])
def test_saving_is_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = saved(tmp_path / "new" / "recipe.json")
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(stage, fail)
    with pytest.raises(OSError, match="disk full"):
        recipe(seed=1).save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_another_layout_of_the_same_values_is_no_edit(tmp_path: Path) -> None:
    def reorder(document: dict[str, Any]) -> None:
        for name in sorted(document, reverse=True):
            document[name] = document.pop(name)
        document["noise"][1]["mu2"] = -1  # was -1.0

    assert Recipe.load(edit(saved(tmp_path / "r.json"), reorder)) == recipe()


def test_an_edit_is_noticed_and_can_be_accepted(tmp_path: Path) -> None:
    path = edit(
        saved(tmp_path / "r.json"), lambda d: d["hyperparameters"].update(lr=0.2)
    )
    with pytest.raises(
        RecipeError,
        match=r"edited after the search.*Recipe\.load\(path, accept_edits=True\)",
    ):
        Recipe.load(path)
    assert Recipe.load(path, accept_edits=True).hyperparameters["lr"] == 0.2
    edit(path, lambda d: d.pop("digest"))
    assert Recipe.load(path, accept_edits=True).hyperparameters["lr"] == 0.2


def test_accepted_edits_are_still_checked(tmp_path: Path) -> None:
    path = edit(saved(tmp_path / "r.json"), lambda d: d.update(total_steps=1000))
    with pytest.raises(RecipeError, match=r"lr_curve\[0\]: 4 values. Must be 36"):
        Recipe.load(path, accept_edits=True)


ALL = sorted(json.loads(VERSION_1.read_text()))


@pytest.mark.parametrize("name", ALL)
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    path = edit(saved(tmp_path / "r.json"), lambda d: d.pop(name))
    with pytest.raises(RecipeError, match=f"Missing field '{name}'") as caught:
        Recipe.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        "",
        -1,
        0.5,
        True,
        None,
        math.nan,
        math.inf,
        "text",
        [[]],
        [None],
        {"a": None},
    ],
)
def test_a_damaged_field_is_named_or_noticed(
    tmp_path: Path, name: str, value: Any
) -> None:
    path = edit(
        saved(tmp_path / "r.json", repeats=REPEATS, settings=SETTINGS, momentum=0.25),
        lambda d: d.update({name: value}),
    )
    valid = {  # values that the field may have: then only the digest tells
        "hyperparameters": [{}, {"a": None}],
        "search": [{}, {"a": None}],
        "versions": [{}],
        "metric": ["text"],
        "workload": ["", "text"],
        "score": [-1, 0.5],
        "noise": [[]],
        "repeats": [[]],
        "settings": [{}, None],
        "momentum": [0.5],
        "digest": ["", "text"],
        # Valid by themselves, but then the curve has another length than they say.
        "base_steps_per_epoch": [0.5, None],
        "scheduler_unit": [None],
    }.get(name, [])
    expected = rf"Invalid {name}\b"
    if any(type(value) is type(v) and value == v for v in valid):
        by_length = r"Invalid lr_curve\[0\]: 4 values|Invalid base_steps_per_epoch=None"
        expected = (
            by_length
            if name in ("base_steps_per_epoch", "scheduler_unit")
            else "digest does not match"
        )
    with pytest.raises(RecipeError, match=expected):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(total_steps=0), "Invalid total_steps=0"),
        (lambda d: d.update(base_steps_per_epoch=0), "Invalid base_steps_per_epoch=0"),
        (
            lambda d: d.update(base_steps_per_epoch=5e-324),
            "Invalid base_steps_per_epoch=5e-324",
        ),
        (lambda d: d.update(score=10**400), "Invalid score=1000"),
        (
            lambda d: d.update(scheduler_unit="batch"),
            "Invalid scheduler_unit='batch'.*'step', 'epoch', None",
        ),
        (lambda d: d.update(mode="maximum"), "Invalid mode='maximum'.*'min', 'max'"),
        (lambda d: d["lr_curve"][1].clear(), r"Invalid lr_curve\[1\]: \[\]"),
        (
            lambda d: d["lr_curve"][1].pop(),
            r"Invalid lr_curve\[1\]: 3 values. Must be 4",
        ),
        (
            lambda d: d["lr_curve"][1].__setitem__(2, -0.1),
            r"Invalid lr_curve\[1\]\[2\]=-0.1",
        ),
        (
            lambda d: d["lr_curve"][1].__setitem__(2, math.nan),
            r"Invalid lr_curve\[1\]\[2\]=nan",
        ),
        (
            lambda d: d["lr_curve"][0].__setitem__(0, "0.1"),
            r"Invalid lr_curve\[0\]\[0\]='0.1'",
        ),
        (lambda d: d["noise"].append([1, 2, 3]), r"Invalid noise\[2\]: \[1, 2, 3\]"),
        (
            lambda d: d["noise"][1].pop("mu2"),
            r"Invalid noise\[1\].*with exactly the fields effective_steps, sigma2, mu2",
        ),
        (lambda d: d["noise"][1].update(loss=1), r"Invalid noise\[1\]"),
        (
            lambda d: d["noise"][0].update(sigma2=math.inf),
            r"Invalid noise\[0\].sigma2=inf",
        ),
        (
            lambda d: d["noise"][1].update(effective_steps=-1),
            r"Invalid noise\[1\].effective_steps=-1",
        ),
        (
            lambda d: d["noise"][1].update(effective_steps=101),
            r"noise\[1\].effective_steps=101.*total_steps=100",
        ),
        (
            lambda d: d["hyperparameters"].update(lr=math.nan),
            "Invalid hyperparameters.lr=nan",
        ),
        (lambda d: d["versions"].update(torch=2), "Invalid versions.torch=2"),
        (
            lambda d: d.update(notes="mine", author="me"),
            "Unknown fields 'author', 'notes'",
        ),
        (
            lambda d: d.update(version=2, new_field=1),
            "Invalid version=2: written by a newer.* reads version 1; upgrade",
        ),
        (
            lambda d: d.update(momentum=1),
            "Invalid momentum=1. Must be at least 0 and below 1",
        ),
        (
            lambda d: d.update(settings=["bf16"]),
            r"Invalid settings: \['bf16'\]. Must be a dict",
        ),
        (
            lambda d: d.update(settings={"precision": "fp8"}),
            r"Invalid settings.precision='fp8'. Must be one of 'fp32'",
        ),
        (
            lambda d: d.update(settings={"grad_clip": 0}),
            r"Invalid settings.grad_clip=0. Must be a positive number, or a",
        ),
        (
            lambda d: d.update(settings={"grad_clip": "1y"}),
            r"Invalid settings.grad_clip='1y'. Must be a positive number",
        ),
        (
            lambda d: d.update(settings={"shuffle": 1}),
            r"Invalid settings.shuffle=1. Must be True or False",
        ),
        (
            lambda d: d.update(settings={"rule": "linear"}),
            r"Invalid settings.rule. Must be one of precision, grad_clip",
        ),
        (
            lambda d: d["repeats"].append([1, 2, 3]),
            r"Invalid repeats\[0\]: \[1, 2, 3\]",
        ),
        (
            lambda d: d["repeats"].append(
                {"seed": 1, "score": 1.0, "noise": [{"mu2": 1}]}
            ),
            r"Invalid repeats\[0\].noise\[0\].*with exactly the fields",
        ),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.load(edit(saved(tmp_path / "r.json"), change))


@pytest.mark.parametrize("cut", [0, 1, 100, -3])
def test_a_file_cut_short_is_no_recipe(tmp_path: Path, cut: int) -> None:
    path = saved(tmp_path / "r.json")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(RecipeError, match="not valid JSON"):
        Recipe.load(path)


@pytest.mark.parametrize("text", ["[]", "3", "[" * 100_000, "\0", "{}"])
def test_other_files_are_no_recipes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"not a recipe|Missing field 'format'"):
        Recipe.load(path)


def test_a_missing_file_is_the_operating_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Recipe.load(tmp_path / "nowhere.json")


# --- Values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "per_epoch", "total", "lengths"),
    [
        (None, None, 100, [1]),
        ("step", None, 3, [1, 2, 3]),
        ("step", 2.0, 3, [1, 2, 3]),
        # the second epoch's rate is the last that a step sees
        ("epoch", 50.0, 100, [2]),
        ("epoch", 50.0, 101, [3]),
        ("epoch", 0.5, 2, [3]),
        ("epoch", 1000.0, 100, [1]),
    ],
)
def test_the_length_of_the_curve(
    unit: Any, per_epoch: float | None, total: int, lengths: list[int]
) -> None:
    for length in range(1, 5):
        changes = {
            "lr_curve": [[0.1] * length],
            "total_steps": total,
            "base_steps_per_epoch": per_epoch,
            "noise": [],
        }
        if length in lengths:
            recipe(scheduler_unit=unit, **changes)
        else:
            with pytest.raises(RecipeError, match=f"lr_curve\\[0\\]: {length} values"):
                recipe(scheduler_unit=unit, **changes)


@given(
    total=st.integers(1, 300),
    examples=st.integers(1, 1000),
    base=st.integers(1, 64),
    turn=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_the_length_agrees_with_the_schedules_own_curve(
    total: int, examples: int, base: int, turn: bool
) -> None:
    per_epoch = examples / base
    if turn:  # a run that ends right after an epoch does, where rounding decides
        total = max(1, round(examples / math.gcd(examples, base))) + 1
    if total / per_epoch > 5000:
        return
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    schedule = EffectiveSchedule(
        optimizer, scheduler, unit="epoch", base_steps_per_epoch=per_epoch
    )
    assert curve_length(total, "epoch", per_epoch) == len(schedule.curve(total)[0])


def test_rounding_does_not_cost_an_epoch() -> None:
    per_epoch = 0.1 + 0.2  # 0.3 and a bit: 3 / per_epoch is just below 10
    assert math.floor(3 / per_epoch) == 9
    assert curve_length(4, "epoch", per_epoch) == 11


def test_numpy_numbers_and_tuples_become_plain(tmp_path: Path) -> None:
    made = recipe(
        hyperparameters={
            "lr": np.float32(0.5),
            "wd": np.float64(0.25),
            "n": np.int64(3),
            "on": np.bool_(True),
            "t": (1, 2),
        },
        base_batch_size=np.int32(32),
        score=np.float32(0.5),
        seed=np.int64(1),
        lr_curve=((np.float64(0.1),) * 4,),
        search={"deep": {"trials": [np.int64(2)]}},
    )
    assert made.hyperparameters == {
        "lr": 0.5,
        "wd": 0.25,
        "n": 3,
        "on": True,
        "t": [1, 2],
    }
    assert [type(v) for v in made.hyperparameters.values()] == [
        float,
        float,
        int,
        bool,
        list,
    ]
    assert type(made.base_batch_size) is int
    assert type(made.score) is float
    assert type(made.lr_curve[0][0]) is float
    made.save(tmp_path / "r.json")
    assert Recipe.load(tmp_path / "r.json") == made


@pytest.mark.parametrize(
    ("hyperparameters", "message"),
    [
        (
            {"init": lambda: 1},
            r"Invalid hyperparameters\.init=<function.*function is no JSON value",
        ),
        ({"a": {"b": [0, object()]}}, r"Invalid hyperparameters\.a\.b\[1\]"),
        ({"w": torch.tensor(1.0)}, r"Invalid hyperparameters\.w.*Tensor"),
        ({"w": np.zeros(2)}, r"Invalid hyperparameters\.w.*ndarray"),
        ({"clip": math.inf}, r"Invalid hyperparameters\.clip=inf"),
        ({"a": {1: 2}}, r"Invalid hyperparameters\.a: the key 1 is not a string"),
        ([1], r"Invalid hyperparameters: \[1\]\. Must be a dict"),
    ],
)
def test_hyperparameters_that_are_not_json_are_named(
    hyperparameters: Any, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(hyperparameters=hyperparameters)


def test_a_recipe_is_frozen_and_shares_nothing_with_its_maker(tmp_path: Path) -> None:
    given_fields = fields()
    made = Recipe(**given_fields)
    given_fields["hyperparameters"]["layers"].append(1)
    given_fields["lr_curve"][0][0] = 9.0
    assert made == recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(made)) == made
    made.hyperparameters["late"] = object()
    with pytest.raises(RecipeError, match=r"hyperparameters\.late"):
        made.save(tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_the_fingerprint_names_the_schedule_and_nothing_else() -> None:
    one = recipe().fingerprint
    assert len(one) == 16
    for same in (
        {"seed": 3},
        {"score": 0.1},
        {"hyperparameters": {}},
        {"noise": []},
        {"created": "2020-01-01"},
    ):
        assert recipe(**same).fingerprint == one
    curve = fields()["lr_curve"]
    curve[1][3] = math.nextafter(curve[1][3], 1)
    changes: list[dict[str, Any]] = [
        {"base_batch_size": 33},
        {"total_steps": 99},
        {"lr_curve": curve},
        {"base_steps_per_epoch": 28.6},
        {"scheduler_unit": "step"},
    ]
    assert len({one, *(recipe(**change).fingerprint for change in changes)}) == 1 + len(
        changes
    )
    # The dataset's length means nothing to a schedule that counts steps.
    by_step = [
        recipe(scheduler_unit="step", base_steps_per_epoch=e).fingerprint
        for e in (None, 10.0)
    ]
    assert by_step[0] == by_step[1]


def test_the_description_has_what_people_ask_for() -> None:
    text = recipe().describe()
    for part in (
        "train.py:workload",
        "32 examples",
        "100 effective steps",
        "3.509 epochs",
        "accuracy = 0.97 (max)",
    ):
        assert part in text
    assert "  hyperparameters lr=0.1" in text  # the attribute's name
    assert "0.1 → 0.001 over 4 values" in text
    assert (
        "2 probes; noise scale over the whole run unknown: the mean μ² is not above 0"
        in text
    )
    noise = [NoiseProbe(effective_steps=t, sigma2=4, mu2=2) for t in (0, 50)]
    assert "about 64 examples" in recipe(noise=noise).describe()  # 32 · 8 / 4
    repeats = [
        Repeat(seed=1, score=0.9, noise=noise),
        Repeat(seed=2, score=0.9, noise=noise),
    ]
    assert (
        "2 probes and 4 with other seeds; noise"
        in recipe(noise=noise, repeats=repeats).describe()
    )
    # as of a search whose trials measure nothing
    confirmed = recipe(noise=[], repeats=repeats[:1])
    assert (
        "2 probes; noise scale over the whole run about 64 examples"
        in confirmed.describe()
    )
    assert "2 probes, 1 repeats" in repr(confirmed)
    assert "not probed" in recipe(noise=[]).describe()
    assert "settings     not kept" in text
    assert (
        "settings     precision='bf16', grad_clip=1.0"
        in recipe(settings=SETTINGS).describe()
    )
    assert "no scheduler" in recipe(lr_curve=[[0.1]], scheduler_unit=None).describe()


def test_a_recipe_in_an_error_or_at_a_prompt_is_one_line() -> None:
    noise = [NoiseProbe(effective_steps=t / 10, sigma2=4, mu2=2) for t in range(1000)]
    text = repr(recipe(noise=noise))
    assert len(text) < 200
    for part in (
        recipe(noise=noise).fingerprint,
        "train.py:workload",
        "accuracy=0.97",
        "1000 probes",
    ):
        assert part in text
