"""What a search is, and the mistakes in it that are found before Ray runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from ray import tune
from ray.train import ScalingConfig
from ray.tune.schedulers import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    PopulationBasedTraining,
    ResourceChangingScheduler,
)
from ray.tune.search import BasicVariantGenerator
from torch import nn

from ray_adascale import AdaScaleConfig, Search
from ray_adascale.search.spec import Asha, SearchSpec, _describe_space

from ..samples_of import regression

B0, T = 16, 200
CONFIG = AdaScaleConfig(base_batch_size=B0, total_steps=T)
TWO = ScalingConfig(num_workers=2)


def spec(**changes: Any) -> SearchSpec:
    return SearchSpec(
        Search(
            **({"workload": regression, "param_space": {}, "config": CONFIG} | changes)
        )
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workload": "file.py:f"}, "Invalid workload of type str"),
        ({"param_space": [1]}, "Invalid param_space of type list"),
        (
            {"config": AdaScaleConfig(base_batch_size=8)},
            r"total_epochs=...\) is needed, one of them",
        ),
        ({"config": AdaScaleConfig(total_steps=8)}, r"base_batch_size=...\) is needed"),
        ({"num_samples": 0}, "Invalid num_samples=0"),
        ({"probe_every": 0}, "Invalid probe_every=0"),
        ({"repeats": -1}, "Invalid repeats=-1"),
        ({"repeat_best": 0}, "Invalid repeat_best=0"),
        ({"config": replace(CONFIG, seed=-1)}, "Invalid seed=-1"),
        ({"max_concurrent_trials": 0}, "Invalid max_concurrent_trials=0"),
        ({"resources_per_trial": {"CPU": -1}}, "Invalid resources_per_trial"),
        ({"resources_per_trial": {"CPU": 0}}, r"reserves something.*'CPU': 0\.01"),
        ({"config": {"precision": "bf16"}}, "Invalid config of type dict"),
        (
            {"config": replace(CONFIG, rule="linear")},
            r"rule='linear'\) for a search: its trials have rule='unscaled'",
        ),
        (
            {"config": replace(CONFIG, report_every_s=1.0)},
            r"report_every_s=1.0\) for a search: .* Leave it out",
        ),
        ({"config": replace(CONFIG, accumulation=2)}, r"accumulation=2\) for a search"),
        ({"config": replace(CONFIG, sharding="oss")}, r"sharding='oss'\) for a search"),
        (
            {"scheduler": "hyperband"},
            "Invalid scheduler='hyperband'. Must be 'asha', None or",
        ),
        (
            {"scheduler": PopulationBasedTraining(hyperparam_mutations={"lr": [1, 2]})},
            "no single config gives",
        ),
        (
            {"scheduler": ResourceChangingScheduler(FIFOScheduler())},
            "A trial has the resources of its start.*Use the scheduler that it wraps",
        ),
        ({"scaling_config": {"num_workers": 2}}, "Invalid scaling_config of type dict"),
        (
            {"scaling_config": ScalingConfig(num_workers=1)},
            r"num_workers=1\) for a trial. Must be a fixed number",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=(1, 2))},
            r"num_workers=\(1, 2\)\) for a trial",
        ),
        (
            {"scaling_config": TWO, "resources_per_trial": {"CPU": 2}},
            "Give a worker's resources",
        ),
        (
            {"scaling_config": TWO, "search_alg": BasicVariantGenerator()},
            "must be limited from outside",
        ),
        (
            {"scaling_config": TWO, "config": replace(CONFIG, base_batch_size=1)},
            "for a base batch of 1: each of 1 passes of a worker needs at least one "
            "example",
        ),
        (
            {"scaling_config": TWO, "config": replace(CONFIG, rule="linear")},
            "its trials have rule='unscaled'",
        ),
        (
            {"scaling_config": TWO, "scheduler": HyperBandScheduler()},
            "HyperBandScheduler with scaling_config. It may pause",
        ),
        (
            {"scheduler": AsyncHyperBandScheduler(metric="error", mode="min")},
            "with metric='error'. Leave its metric and mode out",
        ),
        (
            {"search_alg": BasicVariantGenerator(), "max_concurrent_trials": 2},
            "Give the limit to the BasicVariantGenerator",
        ),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


def test_settings_that_a_search_uses_as_they_are_given_are_accepted() -> None:
    spec(
        config=replace(
            CONFIG, per_worker_batch_size=B0, seed=7, grad_clip=1.0, rule="unscaled"
        )
    )
    on_workers = replace(
        CONFIG,
        sharding="oss",
        checkpoint_every_s=1.0,
        accumulation=2,
        per_worker_batch_size=4,
    )
    spec(config=on_workers, scaling_config=TWO)


def test_no_more_trials_run_at_once_than_have_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "ray_adascale.search.spec.ray.cluster_resources",
        lambda: {"CPU": 9.0, "GPU": 4.0},
    )

    def at_once(most: int | None, **workers: Any) -> int | None:
        return spec(
            scaling_config=ScalingConfig(**workers),
            scheduler=None,
            max_concurrent_trials=most,
        ).trials_at_once()

    assert at_once(None, num_workers=4) == 2
    assert at_once(1, num_workers=4) == 1
    assert at_once(8, num_workers=4) == 2
    assert (
        at_once(
            None, num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 1}
        )
        == 2
    )
    assert at_once(None, num_workers=16) == 1  # nodes may be added
    assert spec(max_concurrent_trials=8).trials_at_once() == 8  # a trial in one process


def test_trials_are_counted_with_the_grid() -> None:
    space = {
        "a": tune.grid_search([1, 2]),
        "b": {"c": tune.grid_search([1, 2, 3]), "d": tune.uniform(0, 1)},
    }
    assert spec(param_space=space, num_samples=1).num_trials == 6
    assert spec(param_space=space, num_samples=3).num_trials == 18
    assert spec(num_samples=3).num_trials == 3


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (
            {"act": tune.choice(["a", nn.ReLU])},
            r"param_space\['act'\]=<class '\S+ReLU'>: type is no JSON value",
        ),
        (
            {"act": tune.grid_search([nn.GELU()])},
            r"param_space\['act'\]=GELU.*: GELU is no JSON value",
        ),
        (
            {"net": {"act": nn.ReLU}},
            r"param_space\['net'\]\['act'\]=.*use a string as its name, and look",
        ),
        (
            {"net": [tune.choice([{"at": Path("x")}])]},
            r"param_space\['net'\]\['at'\]=PosixPath",
        ),
        ({"clip": tune.choice([1.0, float("inf")])}, r"param_space\['clip'\]=inf"),
    ],
)
def test_what_a_recipe_could_not_keep_is_refused_before_anything_runs(
    space: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        spec(param_space=space)


def test_all_that_a_recipe_can_keep_may_be_searched() -> None:
    values = [1, 0.5, "a", True, None, np.float64(0.5), np.int64(3), (1, 2), {"a": [1]}]
    space = {
        "a": tune.choice(values),
        "b": {"c": tune.grid_search(values)},
        "d": tune.loguniform(1e-4, 1),
    }
    # What a function draws is not known before it does.
    spec(
        param_space={
            **space,
            "e": tune.sample_from(lambda _: nn.ReLU),
            "f": tune.randint(0, 3),
        }
    )


def test_what_waits_for_workers_reserves_nothing_that_they_need() -> None:
    assert spec().reserved == spec().resources == {"CPU": 1}
    spread = spec(scaling_config=ScalingConfig(num_workers=4))
    assert spread.resources["CPU"] >= 4
    assert spread.reserved == {"CPU": 0, "memory": 1}


def test_asha_lets_each_trial_run_for_an_eighth_of_t(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    made = Asha()

    def make(**settings: Any) -> Asha:
        given.append(settings)
        return made

    monkeypatch.setattr("ray_adascale.search.spec.Asha", make)
    assert search_scheduler() is made
    assert given == [
        {"time_attr": "effective_steps", "max_t": T, "grace_period": T / 8}
    ]


def search_scheduler() -> Any:
    return spec(scheduler="asha").tune_scheduler


def users_asha() -> Any:
    users = ASHAScheduler(time_attr="effective_steps", max_t=T, grace_period=T // 8)
    return spec(scheduler=users).tune_scheduler


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("of", [search_scheduler, users_asha])
def test_asha_knows_in_a_continued_search_how_good_earlier_trials_were(
    tmp_path: Path, of: Callable[[], Any], continued: bool
) -> None:
    """A trial that is worse than three others at T/8 is stopped there."""

    def trial(name: str, *objectives: float) -> Any:
        reports = [
            {"effective_steps": T / 8 * (i + 1), "objective": objective}
            for i, objective in enumerate(objectives)
        ]
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if continued and reports:
            text = "".join(f"{json.dumps(report)}\n" for report in reports)
            (folder / "result.json").write_text(f'{text}{{"cut off')
        storage = SimpleNamespace(
            trial_dir_name=name,
            trial_fs_path=str(folder),
            storage_filesystem=pyarrow.fs.LocalFileSystem(),
        )
        return SimpleNamespace(trial_id=name, storage=storage), reports

    scheduler = of()
    scheduler.set_search_properties("objective", "max")
    for name in "abc":
        earlier, reports = trial(name, 1.0, 1.0)
        scheduler.on_trial_add(None, earlier)
        for report in [] if continued else reports:
            scheduler.on_trial_result(None, earlier, report)
    late, _ = trial("d")
    scheduler.on_trial_add(None, late)
    report = {"effective_steps": T / 8, "objective": 0.5}
    assert scheduler.on_trial_result(None, late, report) == "STOP"


def test_only_trials_that_may_be_paused_need_checkpoints() -> None:
    assert [
        spec(scheduler=given).may_pause
        for given in ("asha", None, HyperBandScheduler())
    ] == [False, False, True]


def test_a_search_goes_on_only_as_what_it_was_started_as(tmp_path: Path) -> None:
    folder = str(tmp_path / "mine")
    space = {"lr": tune.loguniform(0.1, 1), "depth": 2}
    begun = spec(param_space=space).begin(folder)
    assert not begun.earlier
    # The file identifies the search where it goes on.
    assert json.loads((tmp_path / "mine" / "search.json").read_text()) == {
        "id": begun.id,
        "workload": "tests.samples_of:regression",
        "param_space": {
            "lr": {
                "type": "Float",
                "lower": 0.1,
                "upper": 1,
                "sampler": {"type": "Float._LogUniform"},
            },
            "depth": 2,
        },
        "base_batch_size": B0,
        "total_steps": T,
        "total_epochs": None,
        "num_samples": 8,
        "seed": 0,
        "probe_every": None,
        "evaluate_every": None,
        "config": {
            "precision": "fp32",
            "grad_clip": None,
            "shuffle": True,
            "drop_last": False,
        },
        "num_workers": None,
        "search_alg": "random",
        "scheduler": "asha",
    }
    again = spec(param_space=space).begin(folder)
    assert again == replace(begun, earlier=True)
    assert spec(param_space=space).begin(str(tmp_path / "other")).id != begun.id
    # How many run at once, and what is done with the best, may change.
    assert spec(
        param_space=space,
        max_concurrent_trials=3,
        repeats=2,
        resources_per_trial={"CPU": 2},
    ).begin(folder)
    for change, told in (
        (
            {"config": replace(CONFIG, total_steps=100)},
            r"Invalid total_steps=100: the search in \S+mine was started with 200. Restore it to continue, or",
        ),
        ({"scheduler": None}, "Invalid scheduler=None: .* started with 'asha'"),
        ({"param_space": {}}, "Invalid param_space={}"),
        (
            {"config": replace(CONFIG, grad_clip=1.0)},
            "Invalid config={.*'grad_clip': 1.0",
        ),
        (
            {"config": replace(CONFIG, evaluate_every=50)},
            "Invalid evaluate_every=50: .* started with None",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=2)},
            "Invalid num_workers=2: .* started with None",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            spec(**({"param_space": space} | change)).begin(folder)
    # A file of an earlier release lacks what is compared since.
    kept = json.loads((tmp_path / "mine" / "search.json").read_text())
    del kept["evaluate_every"]
    (tmp_path / "mine" / "search.json").write_text(json.dumps(kept))
    assert spec(param_space=space, config=replace(CONFIG, evaluate_every=50)).begin(
        folder
    )


def test_search_spaces_are_told_apart() -> None:
    def spaces() -> list[Any]:
        return [
            {"lr": tune.loguniform(0.1, 1)},
            {"lr": tune.uniform(0.1, 1)},
            {"lr": tune.loguniform(0.1, 2)},
            {"lr": tune.quniform(0.1, 1, 0.1)},
            {"lr": tune.quniform(0.1, 1, 0.05)},
            {"lr": tune.choice([0.1, 1])},
            {"lr": tune.grid_search([0.1, 1])},
            {"lr": tune.sample_from(lambda spec: 0.1)},
            {"lr": 0.1},
        ]

    described = [json.dumps(_describe_space(space)) for space in spaces()]
    assert len(set(described)) == len(described)
    # as in another process
    assert [json.dumps(_describe_space(space)) for space in spaces()] == described
    assert not any("0x" in text for text in described)
