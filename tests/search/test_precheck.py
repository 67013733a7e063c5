"""The check at drawn values: what fails by chance is a warning, and what every trial
would repeat is a failure.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ray import tune
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Workload
from ray_adascale.analysis.check import Finding
from ray_adascale.search import precheck

CONFIG = AdaScaleConfig(base_batch_size=4, total_steps=10)


def workload(config: dict[str, Any]) -> Workload:
    if config.get("broken"):
        raise TypeError("always")
    print("built", config["lr"], config["width"], config.get("nested"))
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config["lr"]),
        train_dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        loss_fn=lambda model, batch: torch.nn.functional.mse_loss(
            model(batch[0]), batch[1]
        ),
    )


def check(space: Any, **given: Any) -> list[Finding]:
    return precheck.check_at_draws(workload, space, given, CONFIG)


def test_values_that_are_not_given_are_drawn_from_the_space(
    capsys: pytest.CaptureFixture[str],
) -> None:
    space = {
        "lr": tune.loguniform(1e-3, 1e-1),
        "width": tune.grid_search([3, 4]),
        "nested": {"a": tune.choice([7])},
    }
    assert [found.level for found in check(space, width=9)] == ["ok"]
    _, lr, width, nested = capsys.readouterr().out.split(maxsplit=3)
    assert 1e-3 <= float(lr) <= 1e-1
    assert (width, nested.strip()) == ("9", "{'a': 7}")
    # As Tune gives the others' values to a function.
    check(
        {
            "lr": tune.sample_from(lambda spec: 0.1 * spec.config.width),
            "width": tune.choice([2]),
        },
        nested=0,
    )
    assert capsys.readouterr().out == "built 0.2 2 0\n"


def test_values_that_fail_by_chance_are_a_warning_and_others_are_drawn() -> None:
    warning, passed = check({"lr": tune.grid_search([-1.0, 0.1]), "width": 3})
    assert (warning.level, passed.level) == ("warning", "ok")
    assert warning.text.startswith(
        "A trial at lr=-1, drawn from the search space, would fail alone. The build of "
        "the workload failed. ValueError: "
    )
    assert "One forward and backward pass" in passed.text


def test_draws_that_fail_each_in_their_own_way_are_warnings() -> None:
    space = {"lr": tune.uniform(-0.2, -0.1), "width": 3}
    findings = check(space)
    assert [found.level for found in findings] == ["warning"] * 4
    # each at another value
    assert len({found.text.partition(",")[0] for found in findings}) == 4
    assert findings == check(space)  # drawn by the seed


def test_a_second_draw_has_other_values_where_there_are_others() -> None:
    space: dict[str, Any] = {
        "a": tune.choice([1, 2]),
        "b": {"c": tune.randint(0, 2)},
        "d": tune.choice([5]),
    }
    space |= {"e": tune.grid_search([1, 2]), "f": 0}
    for seed in range(10):  # by chance half of them would be equal
        (names, first), (_, second), *_ = precheck._draws(space, seed)
        assert names == ["a", "b", "d", "e"]
        assert {name for name in first if first[name] == second[name]} == {"d", "f"}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            {
                "lr": tune.uniform(0.1, 0.2),
                "width": tune.grid_search([3, 4]),
                "broken": True,
            },
            "The build of the workload failed. TypeError: always",
        ),
        (
            {"lr": 0.1, "width": 3, "broken": tune.choice([True])},
            "It failed alike at each draw from the search space: ",
        ),
        (
            {"lr": tune.sample_from(lambda spec: spec.config["x"])},
            "No values can be drawn from the search space. KeyError",
        ),
    ],
)
def test_what_every_trial_would_repeat_is_a_failure(space: Any, message: str) -> None:
    (failed,) = check(space)
    assert failed.level == "failed"
    assert message in failed.text


def test_a_space_that_is_a_function_is_left_to_tune() -> None:
    (found,) = check(lambda trial: {})
    assert (found.level, found.text) == (
        "ok",
        "The search space is no dictionary, so no pass was made.",
    )
