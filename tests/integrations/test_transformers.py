"""Hugging Face's Trainer, two workers: against Run, against references with equal
and with token weights, and resumed.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ray_adascale import AdaScaleConfig, read_trace
from ray_adascale._warn import AdaScaleWarning

from .. import samples_of
from ..classifier import weights
from .problem import (
    BATCH,
    LR,
    Notes,
    as_if_by_torchrun,
    check_against_reference,
    check_losses,
    dataset,
    make,
    settings,
)

pytest.importorskip("transformers")
ADAPTER = "ray_adascale.integrations.transformers"


class Classifier(nn.Module):
    """The small classifier in the Trainer's shape: a mean loss in a dict, and no
    keyword for the number of items.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(x), labels)}


class Tokens(nn.Module):
    """A loss over tokens, some of which are padding; normalised over all the step's
    tokens where it is told their number.
    """

    def __init__(self, net: nn.Module, heeds: bool = True) -> None:
        super().__init__()
        self.net, self.heeds = net, heeds

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> dict[str, Tensor]:
        if labels is None:  # for a loss function of the user's
            return {"logits": self.net(x)}
        flat = self.net(x).flatten(0, 1), labels.flatten()
        if num_items_in_batch is None or not self.heeds:
            return {"loss": F.cross_entropy(*flat)}
        return {"loss": F.cross_entropy(*flat, reduction="sum") / num_items_in_batch}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, without torchrun's environment."""
    monkeypatch.setitem(globals(), "as_if_by_torchrun", contextlib.nullcontext)


def rows_of(examples: int) -> list[dict[str, Tensor]]:
    x, y = dataset(examples).tensors
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def token_data(examples: int) -> list[dict[str, Tensor]]:
    """Rows of five tokens, of which one to five count, so that passes differ by far
    in their number.
    """
    x, y = dataset(5 * examples).tensors
    length = torch.randint(
        1, 6, (examples,), generator=torch.Generator().manual_seed(3)
    )
    length[::BATCH] = torch.where(
        torch.arange(0, examples, BATCH) % (2 * BATCH) == 0, 5, 1
    )
    x, y = x.view(examples, 5, 6), y.view(examples, 5).clone()
    for row, n in enumerate(length.tolist()):
        y[row, n:] = -100
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


@contextlib.contextmanager
def trainer(
    model: nn.Module | None,
    data: Any,
    total_steps: int,
    accumulation: int,
    folder: str,
    **more: Any,
) -> Iterator[Any]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import TrainingArguments

    from ray_adascale.integrations.transformers import ScaledTrainer

    kind = more.pop("kind", ScaledTrainer)
    with as_if_by_torchrun(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|accelerate|torch)\.")
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        arguments = {
            key: more.pop(key)
            for key in list(more)
            if key in TrainingArguments.__dataclass_fields__
        }
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=0.0,
            report_to=[],
            remove_unused_columns=False,
            **{
                "logging_steps": 5,
                "save_strategy": "no",
                "train_sampling_strategy": "sequential",
                "disable_tqdm": True,
                "per_device_train_batch_size": BATCH,
                **arguments,
            },
        )
        optimizer = scheduler = None  # the Trainer's own, for a model that it makes
        if model is not None:
            _, optimizer, scheduler = make(total_steps)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        try:
            yield kind(
                model=model,
                args=args,
                train_dataset=data,
                optimizers=(optimizer, scheduler),
                **{"adascale": settings(total_steps), **more},
            )
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def noted(made: Any, model: nn.Module) -> Notes:
    """Notes of the steps of a trainer that has yet to make its optimizer."""
    made.create_optimizer()
    return Notes().of(made.schedule.optimizer, model)


def train(
    total_steps: int, accumulation: int, examples: int, folder: str, **more: Any
) -> tuple[Notes, list[Any]]:
    model, data = Classifier(make(total_steps)[0]), rows_of(examples)
    resume = more.pop("resume", None)
    with trainer(model, data, total_steps, accumulation, folder, **more) as made:
        notes = noted(made, model)
        made.train(resume_from_checkpoint=resume)
        return notes, made.state.log_history


def test_the_last_step_of_an_epoch_has_the_passes_that_are_left(
    knowing: Any, tmp_path: Path
) -> None:
    examples = 10 * BATCH * 2
    trace = tmp_path
    found = knowing(ADAPTER).run(
        train, 60, 3, examples, str(tmp_path), trace=str(trace)
    )
    for notes, log in found:
        check_against_reference(
            notes,
            total_steps=60,
            samples=6,
            passes=[3, 3, 3, 1],
            workers=2,
            examples=examples,
        )
        logged = [row for row in log if "loss" in row]
        assert [row["gain"] for row in logged] == [
            notes.gains[row["step"] - 1] for row in logged
        ]
        assert {
            "scale",
            "effective_steps",
            "noise_scale",
            "efficiency",
            "learning_rate",
        } <= set(logged[0])
    rows = read_trace(trace)
    assert [row["gain"] for row in rows] == notes.gains
    check_losses(rows, found[0][0], [3, 3, 3, 1], examples)


def test_killed_and_resumed_by_its_own_checkpoint_it_is_the_same_to_the_bit(
    knowing: Any, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    kept = {"save_strategy": "steps", "save_steps": 6}
    whole = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2, folder, **kept)
    again = knowing(ADAPTER).run(
        train, 60, 2, 8 * BATCH * 2, folder, **kept, resume=f"{folder}/checkpoint-6"
    )
    for (a, _), (b, _) in zip(whole, again, strict=True):
        assert a.gains[6:] == b.gains
        assert a.lrs[6:] == b.lrs
        assert (a.end == b.end).all()


# ---- the batch that is made, and where a run ends ------------------------------------


def split(total_steps: int, folder: str) -> tuple[list[float], list[int]]:
    """S of each step and examples of each pass, where the loader's batch of 4 is
    that of both workers.
    """
    model, sizes, scales = Classifier(make(total_steps)[0]), [], []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["x"])), with_kwargs=True
    )
    data = rows_of(80)
    with trainer(
        model, data, total_steps, 2, folder, accelerator_config={"split_batches": True}
    ) as made:
        noted(made, model)
        made.schedule.optimizer.register_step_pre_hook(
            lambda *_: scales.append(made.schedule.optimizer.scale)
        )
        made.train()
    return scales, sizes


def test_a_split_batch_is_that_of_all_workers(knowing: Any, tmp_path: Path) -> None:
    for scales, sizes in knowing(ADAPTER).run(split, 40, str(tmp_path)):
        assert set(sizes) == {BATCH // 2}
        # 2 examples × 2 workers × 2 passes, of a base batch of 4
        assert set(scales) == {2.0}


class Stream(IterableDataset[dict[str, Tensor]]):
    """Ten batches an epoch, without a length: five for each of two workers. The last
    two are the first ones again.
    """

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        x, y = dataset(8 * BATCH).tensors
        return iter(
            [{"x": x[i % len(x)], "labels": y[i % len(x)]} for i in range(10 * BATCH)]
        )


def streamed(folder: str) -> tuple[Notes, list[str]]:
    model = Classifier(make(40)[0])
    with (
        trainer(model, Stream(), 40, 2, folder, max_steps=40) as made,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        notes = noted(made, model)
        made.train()
    return notes, [str(each.message) for each in seen]


def test_passes_that_are_left_at_the_end_of_a_stream_are_left_out(
    knowing: Any, tmp_path: Path
) -> None:
    # transformers takes no step there, and would add the gradient to that of the next
    # epoch's first step.
    found = knowing(ADAPTER).run(streamed, str(tmp_path))
    for notes, _ in found:
        check_against_reference(
            notes, total_steps=40, samples=4, passes=[2], workers=2, examples=8 * BATCH
        )
    said = [text for text in found[0][1] if "make no whole step of 2 passes" in text]
    assert len(said) == 1


class OutOfMemory(Classifier):
    """A classifier that finds no memory for more than six examples in a pass, from
    its fourth pass on.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.passes = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += 1
        if len(x) > 6 and self.passes > 3:
            raise RuntimeError("CUDA out of memory.")  # as accelerate recognises it
        return super().forward(x, labels)


def finds_batch(folder: str, trace: str) -> tuple[Notes, list[float]]:
    model, scales = OutOfMemory(make(60)[0]), []
    data = rows_of(96)
    arguments = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
    with trainer(model, data, 60, 2, folder, trace=trace, **arguments) as made:
        notes = noted(made, model)
        made.schedule.optimizer.register_step_pre_hook(
            lambda *_: scales.append(made.schedule.optimizer.scale)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.train()
    return notes, scales


def test_a_batch_that_was_made_smaller_for_want_of_memory_has_its_own_scale(
    knowing: Any, tmp_path: Path
) -> None:
    trace = tmp_path
    for notes, scales in knowing(ADAPTER).run(
        finds_batch, str(tmp_path), str(trace)
    ):  # memory runs out in a second pass
        # Eight examples in two passes on two workers, then int(0.9 · 8) = 7, then
        # int(0.9 · 7) = 6.
        assert scales[0] == 8
        assert set(scales[1:]) == {6.0}
        assert 60 <= notes.tau < 66
    rows = read_trace(trace)
    assert [row["scale"] for row in rows] == scales
    assert (
        max(row["loss"] for row in rows) < 1.2 * rows[0]["loss"]
    )  # of two passes each, not of those that failed as well


def ends(folder: str) -> dict[str, Any]:
    """What becomes of further calls of ``train()`` on a trainer at its end, and of
    its last checkpoint.
    """
    model = Classifier(make(20)[0])
    data = rows_of(24)  # three steps an epoch
    found: dict[str, Any] = {}
    with trainer(
        model, data, 20, 1, folder, save_strategy="steps", save_steps=1
    ) as made:
        notes = noted(made, model)
        made.train()
        found["steps"], found["tau"], end = (
            len(notes.gains),
            notes.tau,
            weights(model).clone(),
        )
        try:
            made.train()
        except ValueError as e:
            found["second"] = str(e)
        found["moved"] = float((weights(model) - end).abs().max())
    again = Classifier(make(20)[0])
    evaluated: list[int] = []
    arguments = {"eval_strategy": "epoch", "eval_dataset": data[:8]}
    with (
        trainer(again, data, 20, 1, folder, **arguments) as made,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        evaluate, made.evaluate = (
            made.evaluate,
            lambda *a, **k: evaluated.append(1) or evaluate(*a, **k),
        )
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-{found['steps']}")
        found["resumed"] = (
            made.schedule.effective_steps,
            float((weights(again) - end).abs().max()),
        )
        found["evaluated"] = len(evaluated)
        found["warned"] = [
            str(w.message) for w in caught if "nothing is trained" in str(w.message)
        ]
    return found


def test_a_run_at_its_end_takes_no_further_step(knowing: Any, tmp_path: Path) -> None:
    for rank, found in enumerate(knowing(ADAPTER).run(ends, str(tmp_path))):
        assert (
            "has reached the end of its schedule: effective step 2" in found["second"]
        )
        assert found["moved"] == 0
        assert found["resumed"] == (found["tau"], 0)
        assert found["evaluated"] <= 1
        assert len(found["warned"]) == (rank == 0)


def done(trained: Any, folder: Path) -> dict[str, Any]:
    """Steps that were evaluated and saved, and the step of the best model."""
    return {
        "evaluated": [
            row["step"] for row in trained.state.log_history if "eval_loss" in row
        ],
        "saved": sorted(path.name for path in folder.glob("checkpoint-*")),
        "best": trained.state.best_global_step,
    }


@pytest.mark.parametrize(
    ("strategies", "at_the_end"),
    [
        ({"eval_strategy": "steps", "save_strategy": "steps"}, True),
        ({"eval_strategy": "steps", "save_strategy": "best"}, True),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, True),
        ({"save_strategy": "steps"}, True),
        ({"eval_strategy": "steps", "eval_delay": 500}, False),
        ({}, False),
    ],
)
def test_the_last_step_is_evaluated_and_saved_as_that_of_a_plain_run(
    alone: None, tmp_path: Path, strategies: dict[str, Any], at_the_end: bool
) -> None:
    """The Trainer's own callback compares with max_steps, which is T."""
    import copy

    from transformers import Trainer

    data = rows_of(24)  # three steps an epoch
    arguments = {"eval_steps": 500, "eval_dataset": data[:8], **strategies}
    if {"eval_strategy", "save_strategy"} <= set(strategies):
        arguments["load_best_model_at_end"] = True
        arguments["metric_for_best_model"] = "loss"
    ours = tmp_path / "ours"
    with trainer(
        Classifier(make(20)[0]), data, 20, 2, str(ours), **arguments
    ) as scaled:
        scaled.train()
        steps = scaled.state.global_step
        assert 10 <= steps < 20
        args = copy.copy(scaled.args)
        args.output_dir = str(tmp_path / "plain")
        args.max_steps = steps
        plain = Trainer(
            model=Classifier(make(20)[0]),
            args=args,
            train_dataset=data,
            eval_dataset=data[:8],
        )
        plain.train()
    found = done(scaled, ours)
    assert found == done(plain, tmp_path / "plain")
    last = steps in found["evaluated"] or f"checkpoint-{steps}" in found["saved"]
    assert last == at_the_end
    if "load_best_model_at_end" in arguments:
        assert found["best"] == steps


def test_a_second_train_of_an_unfinished_run_goes_on_and_says_so(
    alone: None, tmp_path: Path
) -> None:
    model = Classifier(make(60)[0])
    data = rows_of(80)
    with trainer(model, data, 60, 2, str(tmp_path), max_steps=10) as made:
        noted(made, model)
        with pytest.warns(UserWarning, match="before the schedule's end"):
            made.train()
        tau = made.schedule.effective_steps
        made.args.max_steps = 60
        with pytest.warns(
            UserWarning, match=rf"goes on at effective step {tau:.0f} of 60"
        ):
            made.train()
        assert 60 <= made.schedule.effective_steps < 62


def test_a_loader_that_makes_other_batches_is_warned_of(
    alone: None, tmp_path: Path
) -> None:
    model = Classifier(make(10)[0])
    data = rows_of(80)
    with trainer(model, data, 10, 2, str(tmp_path)) as made:
        made.get_train_dataloader = lambda: DataLoader(data, batch_size=16)
        with pytest.warns(
            UserWarning, match="makes batches of 16 examples, and the arguments say 4"
        ):
            made.train()
        assert made.schedule.plan.scale == 2


def test_a_model_made_anew_for_each_train_has_a_schedule_and_probes_of_its_own(
    alone: None, tmp_path: Path
) -> None:
    from ray_adascale.integrations.client import RecipeRecorder

    recorder, size = (
        RecipeRecorder(lambda model, batch: model(**batch)["loss"], probe_every=10),
        [1.0],
    )

    def model_init() -> nn.Module:
        made = Classifier(make(20)[0])
        with torch.no_grad():
            made.net[0].weight.mul_(size[0])
        return made

    how = {"model_init": model_init, "optim": "sgd", "lr_scheduler_type": "cosine"}
    ends, noise = [], []
    with trainer(
        None, rows_of(80), 20, 1, str(tmp_path), recorder=recorder, **how
    ) as made:
        for size[0] in (1.0, 1.0, 2.0):
            made.train()
            assert made.schedule.effective_steps == 20
            ends.append(weights(made.model))
            found = recorder.recipe(
                {}, metric="loss", mode="min", score=0.5, workload=make
            ).noise
            assert [probe.effective_steps for probe in found] == [0, 10]
            noise.append([probe.sigma2 for probe in found])
    assert torch.equal(ends[0], ends[1])
    assert noise[0] == noise[1] != noise[2]


# ---- settings of the Trainer that have another meaning --------------------------------


def told(tmp_path: Path, passes: int = 2, **arguments: Any) -> list[str]:
    """Warnings of this package as a trainer with T = 20 is built, 6 base steps an
    epoch.
    """
    model = Classifier(make(20)[0])
    data = rows_of(24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trainer(model, data, 20, passes, str(tmp_path), **arguments):
            pass
    return [str(w.message) for w in caught if w.category is AdaScaleWarning]


@pytest.mark.parametrize(
    ("arguments", "settings", "write"),
    [
        ({"max_steps": 100}, {}, r"AdaScaleConfig\(total_steps=100\)"),
        ({"num_train_epochs": 5}, {}, r"AdaScaleConfig\(total_epochs=5\)"),
        ({}, {"scheduler_unit": "step"}, r"AdaScaleConfig\(total_epochs=3\)"),
    ],
)
def test_a_missing_length_is_named_with_that_of_the_arguments(
    alone: None,
    tmp_path: Path,
    arguments: dict[str, Any],
    settings: dict[str, Any],
    write: str,
) -> None:
    config = AdaScaleConfig(base_batch_size=BATCH, **settings)
    with pytest.raises(ValueError, match=write):
        told(tmp_path, adascale=config, **arguments)


@pytest.mark.parametrize(
    ("arguments", "length", "warned"),
    [
        ({"num_train_epochs": 5}, {"total_epochs": 2}, True),
        ({"num_train_epochs": 5}, {"total_steps": 20}, True),
        ({"num_train_epochs": 2}, {"total_epochs": 2}, False),
        ({"num_train_epochs": 2}, {"total_steps": 12}, False),
        ({}, {"total_epochs": 2}, False),
        ({"num_train_epochs": 5, "max_steps": 12}, {"total_epochs": 2}, False),
    ],
)
def test_other_epochs_than_those_of_the_settings_are_warned_of(
    alone: None,
    tmp_path: Path,
    arguments: dict[str, Any],
    length: dict[str, Any],
    warned: bool,
) -> None:
    config = AdaScaleConfig(base_batch_size=BATCH, scheduler_unit="step", **length)
    said = told(tmp_path, adascale=config, **arguments)
    assert len(said) == warned
    if warned:
        assert "num_train_epochs=5 has no effect" in said[0]
        assert "AdaScaleConfig(total_epochs=5)" in said[0]


@pytest.mark.parametrize(("passes", "warned"), [(2, True), (1, False)])
def test_micro_batches_of_like_lengths_are_warned_of(
    alone: None, tmp_path: Path, passes: int, warned: bool
) -> None:
    said = told(tmp_path, passes, train_sampling_strategy="group_by_length")
    assert len(said) == warned
    if warned:
        assert "the gain is too small" in said[0]
        assert 'train_sampling_strategy="random"' in said[0]


@pytest.mark.parametrize(
    ("passes", "arguments", "write"),
    [
        (
            2,
            {
                "eval_strategy": "steps",
                "eval_steps": 0.25,
                "save_strategy": "steps",
                "save_steps": 0.5,
            },
            "eval_steps=3, save_steps=5",
        ),
        (1, {"save_strategy": "steps", "save_steps": 0.5}, None),
        (2, {"save_strategy": "no", "save_steps": 0.5}, None),
        (2, {"save_strategy": "steps", "save_steps": 5}, None),
    ],
)
def test_shares_of_the_run_are_warned_of(
    alone: None,
    tmp_path: Path,
    passes: int,
    arguments: dict[str, Any],
    write: str | None,
) -> None:
    said = told(tmp_path, passes, eval_dataset=rows_of(8), **arguments)
    assert len(said) == (write is not None)
    if write:
        assert write in said[0]
        assert "T = 20" in said[0]


@pytest.mark.parametrize("method", ["create_scheduler", "create_optimizer"])
def test_a_subclass_that_makes_its_own_parts_is_told_where_the_mixin_goes(
    alone: None, tmp_path: Path, method: str
) -> None:
    from transformers import Trainer

    from ray_adascale.integrations.transformers import AdaScaleMixin, ScaledTrainer

    rates = []

    def create_scheduler(
        self: Any, num_training_steps: int, optimizer: Any = None
    ) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer,
            lambda step: 0.1 if step >= 10 else 1.0,
        )
        return self.lr_scheduler

    def create_optimizer(self: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        return self.optimizer

    made = {"create_scheduler": create_scheduler, "create_optimizer": create_optimizer}
    own = {method: made[method]}
    arguments = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": LR}

    def fit(kind: Any) -> None:
        with trainer(
            None,
            rows_of(24),
            20,
            2,
            str(tmp_path),
            kind=kind,
            **arguments,
            model_init=lambda: Classifier(make(20)[0]),
        ) as scaled:
            scaled.train()
            assert scaled.schedule.finished
            rates.extend(scaled.schedule.base_schedule.lr_curve[0])

    with pytest.raises(ValueError, match=rf"{method}\(\).*AdaScaleMixin, MyTrainer"):
        fit(type("Mine", (ScaledTrainer,), own))
    fit(type("Mine", (AdaScaleMixin, type("MyTrainer", (Trainer,), own)), {}))
    assert rates[0] == LR
    if method == "create_scheduler":
        assert rates[10] == pytest.approx(LR / 10)


def test_a_plain_runs_checkpoint_is_named_as_one(alone: None, tmp_path: Path) -> None:
    from transformers import Trainer

    data = rows_of(24)
    folder = str(tmp_path)
    arguments = {
        "model_init": lambda: Classifier(make(20)[0]),
        "optim": "sgd",
        "save_strategy": "steps",
    }
    with trainer(None, data, 20, 2, folder, **arguments) as scaled:
        scaled.args.max_steps = 3
        model = Classifier(make(20)[0])
        Trainer(model=model, args=scaled.args, train_dataset=data).train()
        scaled.args.max_steps = 20
        with pytest.raises(
            ValueError, match="the checkpoint of a run without AdaScale"
        ):
            scaled.train(resume_from_checkpoint=f"{folder}/checkpoint-3")


def test_a_checkpoint_of_the_model_alone_is_not_resumed_from(
    alone: None, tmp_path: Path
) -> None:
    model, data = Classifier(make(20)[0]), rows_of(24)
    kept = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
    with (
        trainer(model, data, 20, 2, str(tmp_path), max_steps=3, **kept) as made,
        pytest.warns(UserWarning, match="before the schedule's end"),
    ):
        made.train()
    with (
        trainer(model, data, 20, 2, str(tmp_path), **kept) as made,
        pytest.raises(ValueError, match=r"step 3, and has no state.*save_only_model=F"),
    ):
        made.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-3")


def test_one_gradient_sample_a_step_is_refused_with_the_arguments_to_write(
    alone: None, tmp_path: Path
) -> None:
    model, data = Classifier(make(20)[0]), rows_of(24)
    double = {"per_device_train_batch_size": 2 * BATCH}
    with (
        trainer(model, data, 20, 1, str(tmp_path), **double) as made,
        pytest.raises(
            ValueError,
            match=r"scale 2 .*TrainingArguments\(gradient_accumulation_steps=2, "
            r"per_device_train_batch_size=4\)",
        ),
    ):
        made.train()


# ---- tokens --------------------------------------------------------------------------


def on_tokens(
    total_steps: int, accumulation: int, examples: int, folder: str, **more: Any
) -> Notes:
    model = Tokens(make(total_steps)[0])
    with trainer(
        model, token_data(examples), total_steps, accumulation, folder, **more
    ) as made:
        notes = noted(made, model)
        made.train()
        return notes


@pytest.mark.parametrize("over_workers", [True, False])
def test_unequal_tokens_weigh_the_gradient_samples(
    knowing: Any, tmp_path: Path, over_workers: bool
) -> None:
    total_steps, examples = 60, 10 * BATCH * 2
    data = token_data(examples)

    def gradient(net: nn.Sequential, rows: list[int]) -> list[np.ndarray]:
        x, y = (
            torch.stack([data[row][key] for row in rows]) for key in ("x", "labels")
        )
        net.zero_grad()
        Tokens(net)(x, y)["loss"].backward()
        return [torch.cat([p.grad.reshape(-1) for p in net.parameters()]).numpy()]

    def weigh(samples: list[list[int]]) -> list[float]:
        counts = [
            sum(int((data[row]["labels"] != -100).sum()) for row in rows)
            for rows in samples
        ]
        if over_workers:
            w = [count / sum(counts) for count in counts]
        else:  # each worker is divided by its own tokens, and workers count alike
            own = [sum(counts[rank::2]) for rank in range(2)]
            w = [count / own[i % 2] / 2 for i, count in enumerate(counts)]
        assert len(w) < 6 or max(w) > 1.2 * min(w)
        return w

    more = {"average_tokens_across_devices": over_workers}
    for notes in knowing(ADAPTER).run(
        on_tokens, total_steps, 3, examples, str(tmp_path), **more
    ):
        check_against_reference(
            notes, total_steps=total_steps, samples=6, passes=[3, 3, 3, 1], workers=2, examples=examples,
            gradient=gradient, weigh=weigh,
        )  # fmt: skip


def that_ignores(folder: str, passes: int, **more: Any) -> tuple[list[str], Notes]:
    """Train a model that takes the number of items and ignores it. Return the
    warnings, or the error, and the steps.
    """
    model = more.pop("kind_of_model", Tokens)(make(20)[0], heeds=False)
    if more.pop("declared", False):
        model.accepts_loss_kwargs = False  # type: ignore[assignment]
    data = token_data(48)
    # the first passes of the second worker have no token that counts
    if more.pop("empty", False):
        for row in data[BATCH : 2 * BATCH] + data[3 * BATCH : 4 * BATCH]:
            row["labels"] = torch.full_like(row["labels"], -100)
    with (
        trainer(model, data, 20, passes, folder, **more) as made,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        notes = noted(made, model)
        try:
            made.train()
        except ValueError as e:
            return [str(e)], notes
        return [
            str(w.message) for w in caught if "num_items_in_batch" in str(w.message)
        ], notes


def test_the_passes_of_a_model_that_ignores_the_number_of_items_are_averaged(
    knowing: Any, tmp_path: Path
) -> None:
    """As if the model had said so; the Trainer's own gradient is six times too
    large.
    """
    two = knowing(ADAPTER)
    (said, found), (others, _) = two.run(that_ignores, str(tmp_path), 3)
    assert len(said) == 1
    assert "Tokens ignores its argument num_items_in_batch" in said[0]
    assert "6 times too large (2 workers × 3 passes)" in said[0]
    assert others == []
    (silent, declared), _ = two.run(that_ignores, str(tmp_path), 3, declared=True)
    assert silent == []
    assert found.gains == declared.gains
    assert torch.equal(found.end, declared.end)


def test_the_logged_learning_rate_is_that_of_the_step_as_in_the_trainers_own_log(
    alone: None, tmp_path: Path
) -> None:
    logged = []
    more = {"per_device_train_batch_size": BATCH // 2, "max_steps": 20}
    for kind in ({}, {"kind": plain_trainer}):
        model, data = Classifier(make(20)[0]), rows_of(24)
        more["logging_steps"] = 1
        with trainer(model, data, 20, 2, str(tmp_path), **more, **kind) as made:
            made.train()
        logged.append([row.get("learning_rate") for row in made.state.log_history])
    assert logged[0] == logged[1]
    assert logged[0][0] == LR


class Noisy(Tokens):
    """Tokens whose loss has noise in eval mode too, as that of a diffusion model."""

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        loss = super().forward(*args, **kwargs)["loss"]
        draws = torch.rand(()).item() + random.random() + float(np.random.rand())  # noqa: NPY002
        return {"loss": loss * (1 + draws)}


def plain_trainer(adascale: AdaScaleConfig, **arguments: Any) -> Any:
    """transformers' own Trainer with the arguments of a scaled one."""
    from transformers import Trainer

    return Trainer(**arguments)


def test_a_loss_with_noise_at_scale_1_is_bit_identical_to_the_trainers_own(
    alone: None, tmp_path: Path
) -> None:
    ends = []
    more = {"per_device_train_batch_size": BATCH // 2, "max_steps": 20}
    for kind in ({}, {"kind": plain_trainer}):
        model, data = Noisy(make(20)[0]), token_data(24)
        with trainer(model, data, 20, 2, str(tmp_path), **more, **kind) as made:
            random.seed(1)
            np.random.seed(1)  # noqa: NPY002 (the loss draws from the global generator)
            made.train()
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_noise_in_a_loss_does_not_decide_whether_the_number_is_used(
    alone: None, tmp_path: Path
) -> None:
    said, _ = that_ignores(str(tmp_path), 4, kind_of_model=Noisy)
    assert len(said) == 1
    assert "4 times too large (4 passes)" in said[0]


def with_own_loss(**arguments: Any) -> Any:
    """A trainer with a ``compute_loss`` of its own, which takes a mean over a pass."""
    from transformers import Trainer

    from ray_adascale.integrations.transformers import AdaScaleMixin

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None
        ) -> Tensor:
            return model(**inputs)["loss"]

    class Scaled(AdaScaleMixin, Own):
        pass

    return Scaled(**arguments)


@pytest.mark.parametrize("passes", [1, 3])
def test_an_own_compute_loss_is_told_what_the_trainer_does_with_it(
    knowing: Any, tmp_path: Path, passes: int
) -> None:
    """The Trainer's own multiplies by the number of workers; this one does not, so with
    one pass nothing is wrong.
    """
    (said, found), _ = knowing(ADAPTER).run(
        that_ignores, str(tmp_path), passes, kind=with_own_loss
    )
    _, (_, declared) = knowing(ADAPTER).run(
        that_ignores, str(tmp_path), passes, declared=True
    )
    assert len(said) == (passes > 1)
    if said:
        assert "Scaled.compute_loss(), or the model in it, ignores" in said[0]
        assert "3 times too large (3 passes)" in said[0]
    assert found.gains == declared.gains
    assert torch.equal(found.end, declared.end)


def test_a_pass_without_tokens_does_not_decide_whether_the_number_is_used(
    knowing: Any, tmp_path: Path
) -> None:
    """A loss of 0 is the same for every number of items; the workers decide
    together.
    """
    (said, found), _ = knowing(ADAPTER).run(that_ignores, str(tmp_path), 1, empty=True)
    assert len(said) == 1
    assert all(math.isfinite(gain) for gain in found.gains)


def test_a_loss_function_that_ignores_the_number_of_items_is_refused(
    knowing: Any, tmp_path: Path
) -> None:
    for said, _ in knowing(ADAPTER).run(refused, str(tmp_path)):
        assert "compute_loss_func ignores its argument num_items_in_batch" in said
        assert "6 times too large (2 workers × 3 passes)" in said
        assert "Divide by num_items_in_batch in compute_loss_func" in said


def mean_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def refused(folder: str) -> tuple[str, None]:
    said, _ = that_ignores(folder, 3, compute_loss_func=mean_of)
    return said[0], None


def classified(
    folder: str, passes: int, arguments: dict[str, Any] | None = None
) -> tuple[list[str], list[float]]:
    """Train a small BERT as in transformers' examples, with padding. Return the
    warnings and the gains.
    """
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=8,
        )
    )
    words = torch.randint(0, 20, (48, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row[0] % 2} for row in words]
    with (
        trainer(model, data, 10, passes, folder, **arguments or {}) as made,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        notes = noted(made, model)
        made.train()
        assert made.schedule.finished
    return [
        str(w.message) for w in caught if "num_items_in_batch" in str(w.message)
    ], notes.gains


def test_a_bert_classifier_trains_as_its_users_write_it(
    knowing: Any, tmp_path: Path
) -> None:
    (said, gains), (others, same) = knowing(ADAPTER).run(classified, str(tmp_path), 2)
    assert len(said) == 1
    assert (
        "BertForSequenceClassification ignores its argument num_items_in_batch"
        in said[0]
    )
    assert others == []
    assert gains == same
    assert all(1 <= gain <= 4 for gain in gains)


def test_gradient_checkpointing_changes_no_gain_and_bf16_little(
    knowing: Any, tmp_path: Path
) -> None:
    """Passes that run the forward pass again within the backward pass are measured
    once.
    """
    plain, again, half = (
        knowing(ADAPTER).run(classified, str(tmp_path / str(i)), 2, more)[0][1]
        for i, more in enumerate(
            [
                {},
                {"gradient_checkpointing": True},
                {"gradient_checkpointing": True, "bf16": True},
            ]
        )
    )
    assert again == plain
    assert half == pytest.approx(plain, rel=0.05)  # bf16 has 8 bits of precision


# ---- the progress bar ----------------------------------------------------------------


def shown(folder: str, noise: float | None) -> list[tuple[int, int]]:
    """Train to T = 60 at S = 6. Return (steps, steps of the whole run by the
    progress bar) after each step; on rank 0.
    """
    from transformers import ProgressCallback, TrainerCallback

    found: list[tuple[int, int]] = []
    model = Classifier(make(60)[0])
    data = rows_of(96)
    recipe = None
    if noise is not None:
        curve = [[LR * (1 + math.cos(math.pi * t / 60)) / 2 for t in range(60)]]
        recipe = samples_of.recipe(
            [(0, noise, 1)],
            60,
            base_batch_size=BATCH,
            lr_curve=curve,
            scheduler_unit="step",
            base_steps_per_epoch=24.0,
        )
    with trainer(model, data, 60, 3, folder, disable_tqdm=False, recipe=recipe) as made:
        (bar,) = (
            each
            for each in made.callback_handler.callbacks
            if isinstance(each, ProgressCallback)
        )

        class Noting(TrainerCallback):
            def on_step_end(
                self, args: Any, state: Any, control: Any, **_: Any
            ) -> None:
                if bar.training_bar is not None:
                    found.append((state.global_step, bar.training_bar.total))

        made.add_callback(Noting())
        made.train()
    return found


@pytest.mark.parametrize("noise", [None, 4.0])
def test_the_progress_bar_ends_where_the_run_ends(
    knowing: Any, tmp_path: Path, noise: float | None
) -> None:
    """The Trainer's max_steps is T, which is seldom taken: its bar would end at
    20/60, as if it had been cut short.
    """
    found, others = knowing(ADAPTER).run(shown, str(tmp_path), noise)
    assert others == []
    steps, total = found[-1]
    assert total == steps == len(found) < 60
    assert all(total >= step for step, total in found)
    # by the forecast, from the first step on: r = (4 + 1)/(4/6 + 1) = 3
    if noise is not None:
        assert found[0][1] == pytest.approx(60 / 3, abs=4)


def own_bars(folder: str) -> dict[str, Any]:
    """Train to T = 60 with a progress callback of the user's and a notebook's.
    Return what the bars say at the end; on rank 0.
    """
    import sys
    import types
    from unittest import mock

    from transformers import ProgressCallback, TrainerCallback

    display = types.ModuleType("IPython.display")
    display.HTML, display.display = mock.Mock(), mock.Mock()  # type: ignore[attr-defined]
    with mock.patch.dict(
        sys.modules,
        {"IPython": types.ModuleType("IPython"), "IPython.display": display},
    ):
        from transformers.utils.notebook import NotebookProgressCallback

    class Mine(ProgressCallback):
        pass

    class Noting(TrainerCallback):
        """It comes before the others."""

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps, self.bar, self.tracker = (
                state.global_step,
                mine.training_bar,
                notebook.training_tracker,
            )

    mine, notebook, noting = Mine(), NotebookProgressCallback(), Noting()
    data = rows_of(96)
    with trainer(
        Classifier(make(60)[0]),
        data,
        60,
        3,
        folder,
        disable_tqdm=False,
        callbacks=[noting, mine, notebook],
    ) as made:
        kept = [
            each for each in made.callback_handler.callbacks if each in (mine, notebook)
        ]
        made.train()
    label = getattr(noting.tracker, "label", "")
    total = None if noting.bar is None else noting.bar.total
    return {
        "kept": len(kept),
        "steps": noting.steps,
        "bar": total,
        "notebook": label.partition(" ")[0],
    }


def test_progress_bars_of_the_user_and_of_a_notebook_end_there_too(
    knowing: Any, tmp_path: Path
) -> None:
    first, second = knowing(ADAPTER).run(own_bars, str(tmp_path))
    steps = first["steps"]
    assert steps < 60
    assert first == {
        "kept": 2,
        "steps": steps,
        "bar": steps,
        "notebook": f"[{steps}/{steps}",
    }
    assert second["kept"] == 2


# ---- base runs -----------------------------------------------------------------------


def record(folder: str, probing: bool) -> tuple[Any, Tensor]:
    from ray_adascale.integrations.client import RecipeRecorder

    model = Classifier(make(30)[0])
    data = rows_of(80)
    recorder = (
        RecipeRecorder(lambda model, batch: model(**batch)["loss"], probe_every=10)
        if probing
        else None
    )
    with trainer(model, data, 30, 1, folder, recorder=recorder) as made:
        made.train()
        if recorder is None:
            return None, weights(model)
        return recorder.recipe(
            {"lr": LR}, metric="loss", mode="min", score=0.5, workload=make
        ), weights(model)


def test_a_base_run_leaves_its_recipe_and_probing_changes_no_bit(
    alone: None, tmp_path: Path
) -> None:
    recipe, ours = record(str(tmp_path), True)
    _, plain = record(str(tmp_path), False)
    assert torch.equal(ours, plain)
    assert [probe.effective_steps for probe in recipe.noise] == [0, 10, 20]
    assert (recipe.base_batch_size, recipe.total_steps, recipe.scheduler_unit) == (
        BATCH,
        30,
        "step",
    )
    assert recipe.lr_curve[0][15] == pytest.approx(LR / 2)
    assert recipe.momentum == 0.9


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 14), (True, 12)])
def test_epochs_of_a_base_run_have_the_trainers_steps(
    alone: None, tmp_path: Path, drop_last: bool, steps: int
) -> None:
    """26 examples, a batch of 4: an epoch has 7 steps, or 6 full ones."""
    model = Classifier(make(14)[0])
    config = AdaScaleConfig(
        base_batch_size=BATCH, total_epochs=2, scheduler_unit="step"
    )
    with trainer(
        model,
        rows_of(26),
        14,
        1,
        str(tmp_path),
        adascale=config,
        dataloader_drop_last=drop_last,
    ) as scaled:
        scaled.train()
    assert scaled.state.global_step == scaled.args.max_steps == steps


def test_total_epochs_that_the_loaders_sampler_contradicts_are_refused(
    alone: None, tmp_path: Path
) -> None:
    from ray_adascale.integrations.transformers import ScaledTrainer

    class OfSome(ScaledTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SubsetRandomSampler(range(10))

    def train(**length: Any) -> int:
        config = AdaScaleConfig(base_batch_size=BATCH, scheduler_unit="step", **length)
        with trainer(
            Classifier(make(6)[0]),
            rows_of(24),
            6,
            1,
            str(tmp_path),
            kind=OfSome,
            adascale=config,
        ) as scaled:
            scaled.train()
        return int(scaled.state.global_step)

    with pytest.raises(
        ValueError,
        match=r"total_epochs=2\) makes T = 12, .* reads 10 examples in an epoch, by "
        r"which T is 6\. Write AdaScaleConfig\(total_steps=6\)",
    ):
        train(total_epochs=2)
    assert train(total_steps=6) == 6
    assert train(total_epochs=2, dataset_length=12) == 6
