"""The check of a workload: what a run would refuse or get wrong is found by one
small pass, before anything is started.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Workload
from ray_adascale.analysis.check import Finding, check_workload

from ..samples_of import recipe

CONFIG = AdaScaleConfig(base_batch_size=8, total_steps=100)


def workload(config: dict[str, Any], reduction: str = "mean") -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config["lr"]),
        train_dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        loss_fn=lambda model, batch: F.mse_loss(
            model(batch[0]), batch[1], reduction=reduction
        ),
    )


def of(findings: list[Finding], level: str) -> list[str]:
    return [found.text for found in findings if found.level == level]


def test_a_sound_workload_passes_and_nothing_is_trained() -> None:
    built: list[Workload] = []

    def kept(config: dict[str, Any]) -> Workload:
        built.append(workload(config))
        built.append(copy.deepcopy(built[0]))
        return built[0]

    big = AdaScaleConfig(
        base_batch_size=32,
        total_steps=100,
        per_worker_batch_size=64,
        target_efficiency=0.5,
    )
    findings = check_workload(kept, {"lr": 0.1}, big)
    assert [found.level for found in findings] == ["ok"]
    assert re.search(
        r"pass over 8 examples: loss .*, shapes \[8, 4\], \[8, 1\]\.", findings[0].text
    )  # few of the 32, whatever the run's scale
    for now, before in zip(
        built[0].model.parameters(), built[1].model.parameters(), strict=True
    ):
        assert torch.equal(now, before)


@pytest.mark.parametrize(("reduction", "found"), [("mean", 0), ("sum", 1)])
def test_a_loss_that_is_a_sum_is_found_in_spite_of_dropout(
    reduction: str, found: int
) -> None:
    findings = check_workload(
        lambda config: workload(config, reduction), {"lr": 0.1}, CONFIG
    )
    warnings = [each for each in findings if each.level == "warning"]
    assert len(warnings) == found
    assert all(
        "looks like a sum over the examples" in each.text and not each.repeated
        for each in warnings
    )


def test_a_loss_that_is_a_number_fails() -> None:
    def item(config: dict[str, Any]) -> Workload:
        made = workload(config)
        own = made.loss_fn
        made.loss_fn = lambda model, batch: own(model, batch).item()  # type: ignore[assignment,return-value]
        return made

    (text,) = of(check_workload(item, {"lr": 0.1}, CONFIG), "failed")
    assert "pass failed. ValueError: Invalid loss of type float" in text


def test_a_build_that_fails_names_the_hyperparameter_and_the_line() -> None:
    (text,) = of(check_workload(workload, {"lr": "abc"}, CONFIG), "failed")
    assert text.startswith("The build of the workload failed. TypeError: ")
    assert "lr='abc' is text, where a number may be needed." in text
    assert "test_check.py" in text


def test_a_hyperparameter_that_is_never_read_is_named() -> None:
    (warning,) = (
        each
        for each in check_workload(workload, {"lr": 0.1, "l": 1}, CONFIG)
        if each.level == "warning"
    )
    assert "has not read 'l'" in warning.text
    assert warning.repeated  # a run warns of it as well


def test_the_recipes_learning_rates_must_be_the_workloads() -> None:
    frozen = recipe([(0, 3, 1)])  # lr 0.1, B0 8
    assert not of(
        check_workload(workload, {"lr": 0.1}, AdaScaleConfig(), frozen), "failed"
    )
    (text,) = of(
        check_workload(workload, {"lr": 0.2}, AdaScaleConfig(), frozen), "failed"
    )
    assert text.startswith(
        "The preparation of a run failed. ValueError: The learning-rate curve is not "
        "the recipe's"
    )


def test_ray_datas_examples_are_left_out() -> None:
    def without(config: dict[str, Any]) -> Workload:
        made = workload(config)
        made.train_dataset = None
        return made

    (finding,) = check_workload(without, {"lr": 0.1}, CONFIG)
    assert finding.level == "ok"
    assert "no pass was made" in finding.text


def test_a_batch_that_cannot_be_cut_is_used_whole_and_a_loss_that_is_not_finite_warns() -> (
    None
):
    def odd(config: dict[str, Any]) -> Workload:
        made = workload(config)
        made.collate_fn = lambda rows: {
            "x": torch.stack([x for x, _ in rows]),
            "rows": torch.zeros(3),
        }
        made.loss_fn = lambda model, batch: model(batch["x"]).mean() * float("inf")
        return made

    (finding,) = check_workload(odd, {"lr": 0.1}, CONFIG)
    assert finding.level == "warning"
    assert finding.text.startswith("The loss of a batch is ")


@pytest.mark.parametrize(
    ("metrics", "level", "words"),
    [
        ({"accuracy": 0.25}, "ok", "The untrained model was evaluated: accuracy 0.25."),
        (
            None,
            "failed",
            "The evaluation of the untrained model failed. TypeError: evaluate "
            "returned a NoneType",
        ),
        ({"acc": 0.25}, "failed", "metric='accuracy': evaluate returned 'acc'"),
        ({"accuracy": None}, "failed", "metric 'accuracy' of type NoneType"),
        ({"accuracy": "done"}, "failed", "evaluate returned 'done' for it. Must be a"),
        (
            {"accuracy": float("nan")},
            "warning",
            "evaluate returned NaN for the untrained model: 'accuracy'",
        ),
    ],
)
def test_the_untrained_model_is_evaluated(metrics: Any, level: str, words: str) -> None:
    calls: list[Any] = []

    def evaluated(config: dict[str, Any]) -> Workload:
        return replace(
            workload(config),
            evaluate=lambda _: calls.append(1) or metrics,
            metric="accuracy",
            mode="max",
        )

    assert any(
        words in text
        for text in of(check_workload(evaluated, {"lr": 0.1}, CONFIG), level)
    )
    assert len(calls) == 1
    assert not of(
        check_workload(evaluated, {"lr": 0.1}, CONFIG, evaluates=False), "failed"
    )
    assert len(calls) == 1


def test_epochs_at_larger_scales_are_shown() -> None:
    """64 examples, 8 steps an epoch. Without noise S = 4 takes as many steps."""
    found = recipe([(0, 0, 1)], total_steps=100, base_steps_per_epoch=8.0)
    findings = check_workload(workload, {"lr": 0.1}, AdaScaleConfig(), found)
    (shown,) = (text for text in of(findings, "ok") if "Epochs, by" in text)
    assert shown == (
        "Epochs, by the forecast: 12.5 at S = 1, 50 at S = 4, 100 at S = "
        "8, 200 at S = 16."
    )
    (warning,) = (text for text in of(findings, "warning") if "More epochs" in text)
    assert warning.startswith(
        "From S = 4 on. More epochs: 50 epochs, 12.5 in the base run."
    )
    noisy = recipe([(0, 3, 0)], total_steps=100, base_steps_per_epoch=8.0)
    findings = check_workload(workload, {"lr": 0.1}, AdaScaleConfig(), noisy)
    assert not any("ore epochs" in each.text for each in findings)
    none = recipe([], total_steps=100, base_steps_per_epoch=8.0)
    findings = check_workload(workload, {"lr": 0.1}, AdaScaleConfig(), none)
    assert not any("Epochs, by" in each.text for each in findings)


def test_an_exceptions_notes_are_sentences_of_their_own() -> None:
    def failing(config: dict[str, Any]) -> Workload:
        made = workload(config)

        def loss_fn(model: nn.Module, batch: Any) -> Any:
            error = RuntimeError("expected Float")
            error.add_note("In loss_fn(model, batch).")
            raise error

        return replace(made, loss_fn=loss_fn)

    (text,) = of(check_workload(failing, {"lr": 0.1}, CONFIG), "failed")
    assert "RuntimeError: expected Float. In loss_fn(model, batch)." in text
