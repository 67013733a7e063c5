"""Lightning, two workers under DDP: against Run, against the reference, through its
own checkpoints; and what it refuses.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, SubsetRandomSampler

from ray_adascale import AdaScaleConfig, read_trace
from ray_adascale.analysis.report import write_report
from ray_adascale.analysis.runs import load_run
from ray_adascale.integrations.client import RecipeRecorder
from ray_adascale.optim import tau_schedule

from ..classifier import weights
from .problem import (
    BATCH,
    LR,
    Notes,
    as_if_by_torchrun,
    check_against_reference,
    check_losses,
    dataset,
    loss_of,
    make,
    settings,
)

pytest.importorskip("lightning")
ADAPTER = "ray_adascale.integrations.lightning"
AdaScaleCallback: Any = importlib.import_module(ADAPTER).AdaScaleCallback


def module(
    total_steps: int, manual: int = 0, *, validated: bool = False, **changes: Any
) -> Any:
    """A LightningModule of the small classifier; ``manual`` passes a step, if it is
    to step by itself.
    """
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.optimizer, self.scheduler = make(total_steps)
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = loss_of(self.net, batch)
            if manual:
                optimizer, last = self.optimizers(), batch_idx % manual == manual - 1
                with (
                    contextlib.nullcontext()
                    if last
                    else optimizer.toggle_model(sync_grad=False)
                ):
                    self.manual_backward(loss / manual)
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        if validated:

            def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> Any:
            scheduler = {"scheduler": self.scheduler, "interval": "step"}
            return {"optimizer": self.optimizer, "lr_scheduler": scheduler} | changes

    return Module()


def data(examples: int) -> Any:
    """This worker's share, in its order: Lightning's own sampler would shuffle."""
    workers, rank = 1, 0
    if torch.distributed.is_initialized():
        workers, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    rows = torch.arange(examples).view(-1, workers, BATCH)[:, rank].flatten()
    return DataLoader(Subset(dataset(examples), rows.tolist()), batch_size=BATCH)


@contextlib.contextmanager
def quiet() -> Any:
    environment = (
        as_if_by_torchrun()
        if torch.distributed.is_initialized()
        else contextlib.nullcontext()
    )
    with environment, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torch")
        warnings.filterwarnings(
            "always",
            message="Training ended at effective step|A checkpoint was|A step begins"
            "|The learning rate is zero",
        )
        warnings.filterwarnings(
            "ignore", message=".*(does not have many workers|isolated|TreeSpec).*"
        )
        yield


def trainer(callbacks: list[Any], accumulation: int, **more: Any) -> Any:
    import lightning.pytorch as pl

    workers = (
        torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    )
    made: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": workers,
        "strategy": "ddp" if workers > 1 else "auto",
        "max_epochs": -1,
        "accumulate_grad_batches": accumulation,
        "callbacks": callbacks,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**made | more)


class Noting:
    """A callback that notes the steps; after AdaScale's own."""

    def __new__(
        cls, adascale: Any, notes: Notes, save_at: int = 0, path: str = ""
    ) -> Any:
        import lightning.pytorch as pl

        class Callback(pl.Callback):
            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                notes.of(adascale.schedule.optimizer, pl_module.net)

            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if save_at and len(notes.gains) == save_at:
                    trainer.save_checkpoint(path)
                    trainer.should_stop = True

        return Callback()


def train(
    total_steps: int,
    accumulation: int,
    examples: int,
    path: str = "",
    save_at: int = 0,
    resume: bool = False,
    **more: Any,
) -> tuple[Notes, dict[str, float]]:
    manual = more.pop("manual", 0)
    config = settings(total_steps, **({"accumulation": manual} if manual else {}))
    adascale, notes = AdaScaleCallback(config, trace=more.pop("trace", None)), Notes()
    with quiet():
        made = trainer(
            [
                adascale,
                Noting(adascale, notes, save_at, path),
                *more.pop("callbacks", []),
            ],
            accumulation,
            **more,
        )
        if save_at:
            warnings.filterwarnings(
                "ignore", message="Training ended at effective step"
            )
        made.fit(
            module(total_steps, manual),
            data(examples),
            ckpt_path=path if resume else None,
        )
    return notes, {key: float(value) for key, value in made.logged_metrics.items()}


def test_the_last_step_of_an_epoch_has_the_passes_that_are_left(
    knowing: Any, tmp_path: Path
) -> None:
    examples = 10 * BATCH * 2
    trace = tmp_path
    found = knowing(ADAPTER).run(
        train, 60, 3, examples, trace=str(trace), gradient_clip_val=1e6
    )
    for notes, logged in found:
        check_against_reference(
            notes,
            total_steps=60,
            samples=6,
            passes=[3, 3, 3, 1],
            workers=2,
            examples=examples,
        )
        # float32, as Lightning logs
        assert logged["gain"] == pytest.approx(notes.gains[-1], rel=1e-6)
        assert {"scale", "effective_steps", "noise_scale", "efficiency"} <= set(logged)
    notes = found[0][0]
    rows = read_trace(trace)
    assert [row["gain"] for row in rows] == notes.gains
    assert [row["scale"] for row in rows[:8]] == [6, 6, 6, 2] * 2
    assert [row.get("short_step", False) for row in rows[:8]] == [
        False,
        False,
        False,
        True,
    ] * 2
    assert not load_run(trace).changed_its_batch
    check_losses(rows, notes, [3, 3, 3, 1], examples)
    page = write_report(trace, tmp_path / "report.html").read_text()
    assert "Gain r, with its ceiling S dashed" in page
    assert f">{len(rows)}</td>" in page


def test_manual_optimization_says_its_passes(knowing: Any) -> None:
    examples = 8 * BATCH * 2
    for notes, _ in knowing(ADAPTER).run(train, 40, 1, examples, manual=2):
        check_against_reference(
            notes, total_steps=40, samples=4, passes=[2], workers=2, examples=examples
        )


def test_killed_and_resumed_by_its_own_checkpoint_it_is_the_same_to_the_bit(
    knowing: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "some.ckpt")
    # Four steps an epoch; Lightning resumes exactly at an epoch's end.
    whole = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2)
    first = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2, path, 8)
    rest = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2, path, resume=True)
    for (a, _), (b, _), (c, _) in zip(whole, first, rest, strict=True):
        assert len(b.gains) == 8
        assert b.gains + c.gains == a.gains
        assert b.lrs + c.lrs == a.lrs
        assert (c.end == a.end).all()


def scheduled(total_steps: int, examples: int, trace: str) -> Notes:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return train(
        total_steps,
        1,
        examples,
        callbacks=[GradientAccumulationScheduler({0: 2, 2: 4})],
        trace=trace,
    )[0]


def test_an_accumulation_that_changes_between_epochs_is_followed(
    knowing: Any, tmp_path: Path
) -> None:
    examples = 8 * BATCH * 2
    trace = tmp_path
    for notes in knowing(ADAPTER).run(scheduled, 60, examples, str(trace)):
        # Two epochs of four steps, and then such of two; one epoch of the pattern is
        # all that the run sees of it.
        passes = [2] * 8 + [4] * len(notes.gains)
        check_against_reference(
            notes,
            total_steps=60,
            samples=8,
            passes=passes,
            workers=2,
            examples=examples,
        )
    # The trace has the scale of each step: two workers with two passes of B0, and then
    # with four.
    rows = read_trace(trace)
    assert len(rows) == len(notes.gains) > 8
    assert [row["scale"] for row in rows] == [4.0] * 8 + [8.0] * (len(rows) - 8)
    assert [row["efficiency"] for row in rows] == [
        row["gain"] / row["scale"] for row in rows
    ]


# ---- one process ---------------------------------------------------------------------


def fit(callback: Any, wanted: Any, accumulation: int = 2, **more: Any) -> Any:
    with quiet():
        made = trainer(
            callback if isinstance(callback, list) else [callback], accumulation, **more
        )
        made.fit(wanted, data(80))
    return made


def test_bf16_measures_float32_gradients() -> None:
    callback = AdaScaleCallback(settings(20))
    fit([float_inputs(), callback], module(20).float(), precision="bf16-mixed")
    assert callback.schedule is not None
    assert callback.schedule.finished
    assert 1 < callback.schedule.optimizer.gain() < 2  # type: ignore[attr-defined]


def float_inputs() -> Any:
    import lightning.pytorch as pl

    class Cast(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            batch[0] = batch[0].float()

    return Cast()


def test_a_base_run_leaves_its_recipe_and_probing_changes_no_bit() -> None:
    ends = []
    recorder = RecipeRecorder(
        lambda module, batch: loss_of(module.net, batch), probe_every=10
    )
    for record in (recorder, None):
        trained = module(30)
        fit(AdaScaleCallback(settings(30), recorder=record), trained, accumulation=1)
        ends.append(weights(trained))
    assert torch.equal(*ends)
    recipe = recorder.recipe(
        {"lr": LR}, metric="loss", mode="min", score=0.5, workload=make
    )
    assert [probe.effective_steps for probe in recipe.noise] == [0, 10, 20]
    assert recipe.lr_curve[0][15] == pytest.approx(LR / 2)
    assert (recipe.momentum, recipe.optimizer_class) == (0.9, "SGD")

    fit(
        AdaScaleCallback(settings(20), recorder=recorder), module(20), accumulation=1
    )  # another run: its own probes only
    again = recorder.recipe(
        {"lr": LR}, metric="loss", mode="min", score=0.5, workload=make
    )
    assert [probe.effective_steps for probe in again.noise] == [0, 10]

    fit(AdaScaleCallback(AdaScaleConfig(), recipe), module(30))
    with pytest.raises(ValueError, match="The learning-rate curve is not the recipe's"):
        fit(AdaScaleCallback(AdaScaleConfig(), recipe), module(31))
    with pytest.raises(
        ValueError, match="this one has scale 2, 1 workers and 2 passes"
    ):
        fit(AdaScaleCallback(settings(30), recorder=recorder), module(30))


def test_a_checkpoint_between_the_passes_of_a_step_has_the_state_of_the_step_before(
    tmp_path: Path,
) -> None:
    """Lightning saves after each validation, here after 6 batches of an accumulation
    of 4; plain Lightning goes on.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    def fit(
        name: str, save: bool, ckpt_path: Path | None = None
    ) -> list[dict[str, Any]]:
        callbacks = [AdaScaleCallback(settings(40), trace=tmp_path / name)]
        if save:
            callbacks += [ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)]
        with quiet(), pytest.MonkeyPatch.context() as patched:
            patched.chdir(tmp_path)
            trainer(
                callbacks,
                4,
                val_check_interval=6,
                enable_checkpointing=save,
                num_sanity_val_steps=0,
            ).fit(module(40, validated=True), data(96), data(8), ckpt_path=ckpt_path)
        return read_trace(tmp_path / name)

    alone = fit("alone.jsonl", False)
    with pytest.warns(
        UserWarning, match="saved after batch 6 of an epoch, between the 4 passes"
    ) as caught:
        rows = fit("saved.jsonl", True)
    assert sum("between the 4 passes" in str(w.message) for w in caught) == 1
    # saving changes nothing
    assert [row["gain"] for row in rows] == [row["gain"] for row in alone]
    within = tmp_path / "epoch=0-step=1.ckpt"
    state = torch.load(within, weights_only=True)["optimizer_states"][0]["adascale"]
    assert float(state["effective_steps"]) == rows[0]["effective_steps"]
    # Resumed after batch 6, Lightning steps after batch 8. The first step counts its
    # two passes.
    again = fit("again.jsonl", False, within)
    assert [row["scale"] for row in again[:3]] == [2.0, 4.0, 4.0]
    assert 1 <= again[0]["gain"] <= 2
    assert again[0]["effective_steps"] == rows[0]["effective_steps"] + again[0]["gain"]
    assert again[-1]["effective_steps"] >= 40


def test_a_manual_step_after_other_passes_than_declared_is_told_where_they_are_declared() -> (
    None
):
    with pytest.raises(
        RuntimeError,
        match=r"after backward pass 2 of a step.*With Lightning's manual optimization the passes are",
    ):
        fit(
            AdaScaleCallback(settings(40, accumulation=3)),
            module(40, manual=2),
            accumulation=1,
        )


def test_a_checkpoint_within_a_manual_step_is_refused(tmp_path: Path) -> None:
    """Where a step ends is known to the user's training_step alone, so a resume
    could not go on with its passes.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    with (
        quiet(),
        pytest.raises(
            RuntimeError, match=r"state_dict\(\) between a backward pass and step\(\)"
        ),
    ):
        trainer(
            [AdaScaleCallback(settings(40, accumulation=2)), saving],
            1,
            val_check_interval=3,
            enable_checkpointing=True,
            num_sanity_val_steps=0,
        ).fit(module(40, manual=2, validated=True), data(96), data(8))


def test_a_fast_dev_run_is_not_warned_of() -> None:
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer([AdaScaleCallback(settings(40))], 1, fast_dev_run=True).fit(
            module(40), data(80)
        )
    assert not any("Training ended" in str(w.message) for w in caught)


def test_a_run_that_ends_too_early_is_warned_of() -> None:
    with pytest.warns(
        UserWarning, match=r"ended at effective step \d+ of 1000.*max_epochs=1"
    ):
        fit(AdaScaleCallback(settings(1000)), module(1000), max_epochs=1)


def test_a_run_that_a_callback_stops_is_not_told_to_set_what_it_has() -> None:
    import lightning.pytorch as pl

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    with pytest.warns(UserWarning, match=r"of 1000.*EarlyStopping") as caught:
        fit([AdaScaleCallback(settings(1000)), Stops()], module(1000))
    assert not any("max_epochs" in str(w.message) for w in caught)


def test_a_scheduler_that_is_too_short_is_refused_with_the_length_of_the_run() -> None:
    wanted = module(100)
    wanted.scheduler = torch.optim.lr_scheduler.OneCycleLR(
        wanted.optimizer, max_lr=LR, total_steps=50
    )
    with pytest.raises(ValueError, match="Tried to step 51 times") as caught:
        fit(AdaScaleCallback(settings(100)), wanted)
    assert "length of the base run, 100 steps:" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("manual", "write"),
    [
        (0, r"Trainer\(accumulate_grad_batches=2\)"),
        (1, r"AdaScaleConfig\(accumulation=2\), each loss divided by 2,"),
    ],
)
def test_one_gradient_sample_a_step_is_refused_with_the_settings_to_write(
    manual: int, write: str
) -> None:
    config = replace(settings(20), base_batch_size=BATCH // 2)
    with pytest.raises(
        ValueError, match=rf"scale 2 .*{write} and a dataloader with batch_size=2\."
    ):
        fit(AdaScaleCallback(config), module(20, manual), accumulation=1)


def test_a_schedule_of_the_length_that_lightning_estimates_is_told_to_take_t() -> None:
    """Which is infinite, since the page's Trainer has ``max_epochs=-1``."""
    wanted = module(20)

    def configure() -> Any:
        length = wanted.trainer.estimated_stepping_batches
        warmup = 0.1 * length
        wanted.scheduler = torch.optim.lr_scheduler.LambdaLR(
            wanted.optimizer, lambda step: min(1.0, step / warmup)
        )
        scheduler = {"scheduler": wanted.scheduler, "interval": "step"}
        return {"optimizer": wanted.optimizer, "lr_scheduler": scheduler}

    wanted.configure_optimizers = configure
    with pytest.warns(
        UserWarning, match=r"zero in all steps.*estimated_stepping_batches.*T = 20 in"
    ):
        fit(AdaScaleCallback(settings(20)), wanted)


def test_an_average_of_weights_decays_with_the_gain_as_the_page_has_it() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import WeightAveraging

    decay = 0.9
    callback = AdaScaleCallback(settings(20))
    averages: list[Tensor] = []

    class Average(pl.Callback):
        """By hand."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            optimizer = callback.schedule.optimizer
            if not optimizer.at_boundary:
                return
            now = weights(pl_module).clone()
            if not averages:
                averages.append(now)
            kept = decay**optimizer.last_step.gain
            averages.append(kept * averages[-1] + (1 - kept) * now)

    averaging = WeightAveraging(
        avg_fn=lambda average, weight, _: torch.lerp(
            weight, average, decay**callback.schedule.optimizer.last_step.gain
        )
    )
    wanted = module(20)
    fit([callback, Average(), averaging], wanted)
    assert callback.schedule.effective_steps >= 20
    torch.testing.assert_close(weights(wanted), averages[-1])


def scheduled_module(interval: str | None, **more: Any) -> Any:
    """A module whose scheduler has this interval, or Lightning's default; and
    further entries beside it.
    """
    wanted = module(60)
    entry = {
        "scheduler": wanted.scheduler,
        **({} if interval is None else {"interval": interval}),
        **more,
    }
    wanted.configure_optimizers = lambda: {
        "optimizer": wanted.optimizer,
        "lr_scheduler": entry,
    }
    return wanted


def test_the_unit_of_the_scheduler_is_its_interval_in_lightning() -> None:
    # 80 examples are 20 base steps an epoch, so 60 calls of the scheduler or 3. The
    # cosine is of 60 calls.
    for interval, unit, calls in (
        ("step", "step", 60),
        ("epoch", "epoch", 3),
        (None, "epoch", 3),
    ):
        callback = AdaScaleCallback(
            AdaScaleConfig(base_batch_size=BATCH, total_steps=60)
        )
        fit(callback, scheduled_module(interval))
        assert callback.schedule is not None
        base = callback.schedule.base_schedule
        assert base.scheduler_unit == unit
        expected = [LR * (1 + math.cos(math.pi * i / 60)) / 2 for i in range(calls)]
        assert base.lr_curve[0] == pytest.approx(expected, rel=1e-9)
        # The end of the run has the LR of its last base step; float64 rounding.
        assert float(callback.schedule.get_last_lr()[0]) == pytest.approx(
            expected[-1], rel=1e-9
        )


@pytest.mark.parametrize(
    ("interval", "more", "message"),
    [
        (
            None,
            {},
            r"interval='epoch', and AdaScaleConfig\(scheduler_unit=...\) is 'step'. Lightning's default",
        ),
        ("step", {"frequency": 5}, r"frequency=5.*factor\(i // 5\)"),
    ],
)
def test_a_scheduler_that_the_base_run_would_have_stepped_otherwise_is_refused(
    interval: str | None, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(AdaScaleCallback(settings(60)), scheduled_module(interval, **more))


def test_a_scheduler_of_another_unit_than_the_recipes_is_refused() -> None:
    recorder = RecipeRecorder(lambda module, batch: loss_of(module.net, batch))
    fit(AdaScaleCallback(settings(60), recorder=recorder), module(60), accumulation=1)
    recipe = recorder.recipe({}, metric="loss", mode="min", score=0.5, workload=make)
    with pytest.raises(
        ValueError, match="interval='epoch', and the recipe's scheduler_unit is 'step'"
    ):
        fit(AdaScaleCallback(AdaScaleConfig(), recipe), scheduled_module("epoch"))


def test_a_minimum_length_that_may_go_beyond_the_end_is_refused() -> None:
    # S = 2 and T = 60: at least 30 steps. Ten steps an epoch.
    with pytest.raises(
        ValueError,
        match=r"min_steps=31\) makes Lightning train for at least 31 .* end after 30, at 60",
    ):
        fit(AdaScaleCallback(settings(60)), module(60), min_steps=31)
    with pytest.raises(
        ValueError, match=r"min_epochs=4\) makes Lightning train for at least 40 "
    ):
        fit(AdaScaleCallback(settings(60)), module(60), min_epochs=4)
    callback = AdaScaleCallback(settings(60))
    fit(callback, module(60), min_steps=30, min_epochs=3)
    assert callback.schedule is not None
    assert 60 <= callback.schedule.effective_steps < 62


def test_a_minimum_of_epochs_of_unknown_length_is_not_held_against_it() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(dataset(80))

    # Lightning makes min_epochs=1 of min_steps=1 by itself.
    callback = AdaScaleCallback(settings(60))
    with quiet():
        trainer([callback], 2, min_steps=1).fit(
            module(60), DataLoader(Stream(), batch_size=BATCH)
        )
    assert callback.schedule is not None
    assert 60 <= callback.schedule.effective_steps < 62


def test_a_fit_that_failed_before_its_first_step_may_be_tried_again() -> None:
    callback, fails = AdaScaleCallback(settings(20)), module(20)
    fails.training_step = lambda batch, batch_idx: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(callback, fails)
    fit(callback, module(20))
    assert callback.schedule is not None
    assert callback.schedule.finished


def test_steps_beyond_the_end_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch as pl

    monkeypatch.setattr(tau_schedule, "_SCHEDULES", [])

    class GoesOn(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 50

    callback = AdaScaleCallback(settings(20))
    with pytest.warns(
        UserWarning,
        match=r"begins at effective step 2\d, and .* ended at 20\..*min_epochs.*clears should_stop",
    ):
        fit([callback, GoesOn()], module(20))


def test_a_batch_size_that_changes_between_epochs_is_followed(tmp_path: Path) -> None:
    wanted, sizes = module(200), iter([8, 20, 8, *[20] * 99])
    wanted.train_dataloader = lambda: DataLoader(dataset(80), batch_size=next(sizes))
    trace = tmp_path
    callback = AdaScaleCallback(settings(200), trace=trace)
    with quiet():
        trainer([callback], 2, reload_dataloaders_every_n_epochs=1).fit(wanted)
    scales = [row["scale"] for row in read_trace(trace)]
    assert scales[:14] == [4.0] * 5 + [10.0] * 2 + [4.0] * 5 + [10.0] * 2

    shrinks = module(200)
    sizes = iter([4, 2])
    shrinks.train_dataloader = lambda: DataLoader(dataset(80), batch_size=next(sizes))
    with (
        quiet(),
        pytest.raises(
            ValueError, match=r"now 2 examples .* fewer than the base batch size of 4"
        ),
    ):
        trainer(
            [AdaScaleCallback(settings(200))], 1, reload_dataloaders_every_n_epochs=1
        ).fit(shrinks)


def test_a_recorded_base_run_whose_batch_grows_is_refused() -> None:
    wanted, sizes = module(200), iter([4, 8])
    wanted.train_dataloader = lambda: DataLoader(dataset(80), batch_size=next(sizes))
    recorder = RecipeRecorder(lambda module, batch: loss_of(module.net, batch))
    with (
        quiet(),
        pytest.raises(ValueError, match="this one has scale 2, 1 workers and 1 passes"),
    ):
        trainer(
            [AdaScaleCallback(settings(200), recorder=recorder)],
            1,
            reload_dataloaders_every_n_epochs=1,
        ).fit(wanted)


def test_a_second_fit_resumes_or_is_refused(tmp_path: Path) -> None:
    callback, wanted = AdaScaleCallback(settings(20)), module(20)
    made = fit(callback, wanted)
    path = tmp_path / "end.ckpt"
    made.save_checkpoint(path)
    with (
        quiet(),
        pytest.raises(
            ValueError,
            match=r"has trained before, to effective step 2[01] of 20.*ckpt_path",
        ),
    ):
        made.fit(wanted, data(80))

    for again in (callback, AdaScaleCallback(settings(20))):  # the same one may resume
        loaded = module(20)
        with (
            quiet(),
            pytest.warns(
                UserWarning,
                match="step 2[01] of 20, the schedule's end: nothing is trained",
            ),
        ):
            trainer([again], 2).fit(loaded, data(80), ckpt_path=path)
        assert torch.equal(weights(loaded), weights(wanted))


def test_what_it_cannot_be_right_with_is_refused() -> None:
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        StochasticWeightAveraging,
    )

    two = module(10)
    two.configure_optimizers = lambda: [
        two.optimizer,
        torch.optim.SGD(two.parameters(), lr=0.1),
    ]
    two.automatic_optimization = False
    with pytest.raises(ValueError, match=r"2 optimizers\. Must be one.*OptimizerChain"):
        fit(AdaScaleCallback(settings(10)), two, accumulation=1)
    for its_own, instead in (
        (
            StochasticWeightAveraging(0.01, swa_epoch_start=1),
            "Lightning's WeightAveraging",
        ),
        (BackboneFinetuning(), "a parameter group of its own"),
    ):
        with pytest.raises(ValueError, match=f"sets learning rates.*{instead}"):
            with_backbone = module(10)
            with_backbone.backbone = torch.nn.Linear(1, 1)
            fit([AdaScaleCallback(settings(10)), its_own], with_backbone, 1)
    with pytest.raises(ValueError, match="ModelParallelStrategy is not supported"):
        from lightning.pytorch.strategies import ModelParallelStrategy

        from ray_adascale.integrations.lightning import _check

        made = trainer([], 1)
        # one of its own needs GPUs and processes
        made.strategy.__class__ = ModelParallelStrategy
        _check(made)


# ---- an epoch ------------------------------------------------------------------------


def shuffled(examples: int, *, drop_last: bool, **more: Any) -> Any:
    order = torch.Generator().manual_seed(3)
    shuffle = "sampler" not in more
    return DataLoader(
        dataset(examples),
        BATCH,
        shuffle=shuffle,
        drop_last=drop_last,
        generator=order,
        **more,
    )


@pytest.mark.parametrize("drop_last", [True, False])
def test_at_scale_1_a_run_in_epochs_is_bit_identical_to_lightnings_own(
    drop_last: bool,
) -> None:
    ends = []
    for callbacks, epochs in (
        ([], 3),
        ([AdaScaleCallback(AdaScaleConfig(base_batch_size=BATCH, total_epochs=3))], -1),
    ):
        wanted = scheduled_module("epoch")
        with quiet():
            made = trainer(callbacks, 1, max_epochs=epochs)
            made.fit(wanted, shuffled(22, drop_last=drop_last))
        ends.append((made.global_step, weights(wanted).tolist()))
    assert ends[0][0] == 3 * (5 if drop_last else 6)
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("limit", "passes", "total_steps"),
    [(0.5, 1, 15), (0.5, 2, 15), (4, 1, 12), (4, 2, 12), (1.0, 2, 30), (99, 1, 30)],
)
def test_an_epoch_has_the_batches_that_the_trainer_is_limited_to(
    limit: float, passes: int, total_steps: int
) -> None:
    config = AdaScaleConfig(
        base_batch_size=BATCH, total_epochs=3, scheduler_unit="step"
    )
    callback = AdaScaleCallback(config)
    wanted = module(total_steps)
    with quiet():
        trainer([callback], passes, limit_train_batches=limit).fit(wanted, data(40))
    assert callback.schedule.base_schedule.total_steps == total_steps


def test_an_epoch_has_the_examples_of_the_sampler() -> None:
    config = AdaScaleConfig(
        base_batch_size=BATCH, total_epochs=3, scheduler_unit="step"
    )
    callback = AdaScaleCallback(config)
    half = shuffled(40, drop_last=True, sampler=SubsetRandomSampler(range(20)))
    with quiet():
        trainer([callback], 1).fit(module(15), half)
    assert callback.schedule.base_schedule.total_steps == 15
