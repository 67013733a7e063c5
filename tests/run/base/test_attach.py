"""attach: S, n and T for a loop that others own, the recipe's checks, and what it
can't be right with.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from ray_adascale import (
    OSS,
    AdaScale,
    AdaScaleConfig,
    AdaScaleOptimizer,
    TauSchedule,
    attach,
    record_recipe,
)

from ...integrations.problem import (
    BATCH,
    Notes,
    assert_same_run,
    by_run,
    dataset,
    loss_of,
    make,
    settings,
)
from ...optim.test_tau_schedule import Timms
from ...samples_of import regression


def test_scale_and_samples_follow_from_the_clients_batch() -> None:
    model, optimizer, scheduler = make(100)
    adascale, schedule = attach(
        model,
        optimizer,
        scheduler,
        settings(100, per_worker_batch_size=2 * BATCH, accumulation=3),
    )
    assert isinstance(adascale, AdaScaleOptimizer)
    assert isinstance(schedule, TauSchedule)
    assert (adascale.scale, adascale.num_samples) == (6.0, 3)
    assert schedule.base_schedule.total_steps == 100
    assert not schedule.finished
    adascale.effective_steps = 100.0
    assert schedule.finished


def test_epochs_are_counted_by_the_datasets_length() -> None:
    model, optimizer, _ = make(100)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    config = AdaScaleConfig(
        base_batch_size=8,
        total_epochs=3,
        scheduler_unit="epoch",
        dataset_length=100,
        accumulation=2,
    )
    _, schedule = attach(model, optimizer, scheduler, config)
    assert schedule.base_schedule.total_steps == 37
    assert [*schedule.base_schedule.lr_curve] == [[0.05, 0.025, 0.0125]]


def under_ddp(total_steps: int, examples: int) -> tuple[Notes, Notes]:
    """A loop by hand, with DistributedDataParallel and no client at all."""
    import torch.distributed as dist

    model, optimizer, scheduler = make(total_steps)
    adascale, schedule = attach(model, optimizer, scheduler, settings(total_steps))
    ddp = DistributedDataParallel(model)
    notes = Notes().of(adascale, model)
    x, y = dataset(examples).tensors
    position = dist.get_rank() * BATCH
    while not schedule.finished:
        rows = [(position + j) % examples for j in range(BATCH)]
        adascale.zero_grad()
        loss_of(ddp, (x[rows], y[rows])).backward()
        adascale.step()
        position += 2 * BATCH
    return notes, by_run(total_steps, 1, examples)


def test_a_loop_by_hand_is_the_run_that_run_makes(pool: Any) -> None:
    for ours, theirs in pool(2).run(under_ddp, 40, 160):
        assert_same_run(ours, theirs)


def test_several_processes_without_a_process_group_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    model, optimizer, scheduler = make(10)
    with pytest.raises(
        RuntimeError,
        match=r"4 processes.*no process group.*after init_process_group\(\)",
    ):
        attach(model, optimizer, scheduler, settings(10, accumulation=2))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda m, o: (m, [o, o]), "a list of 2"),
        (lambda m, o: (m, AdaScale(o)), "Pass the bare optimizer"),
        (lambda m, o: (m, OSS.wrap(o)), "Pass the bare optimizer"),
        (lambda m, o: (nn.DataParallel(m), o), "a DataParallel"),
    ],
)
def test_what_is_wrapped_or_several_is_refused(wrong: Any, match: str) -> None:
    model, optimizer, scheduler = make(10)
    model, optimizer = wrong(model, optimizer)
    with pytest.raises(ValueError, match=match):
        attach(model, optimizer, scheduler, settings(10, accumulation=2))


def sharded() -> list[str]:
    """What a model gets for an answer whose parameters no worker holds whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    said = []
    for shard in (
        fully_shard,
        lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
    ):
        model = shard(make(10)[0].float())
        optimizer = SGD(model.parameters(), lr=0.1)
        try:
            attach(model, optimizer, None, settings(10))
        except ValueError as e:
            said.append(str(e))
    return said


def test_a_sharded_model_is_refused(pool: Any) -> None:
    for two, one in pool(2).run(sharded):
        assert "DTensors" in two
        assert "FSDP1" in one


def test_the_curve_must_be_the_recipes() -> None:
    recipe = record_recipe(regression, {}, base_batch_size=4, total_steps=12)
    built = regression({"total_steps": 12})
    config = AdaScaleConfig(per_worker_batch_size=4, accumulation=2)
    adascale, schedule = attach(
        built.model, built.optimizer, built.scheduler, config, recipe
    )
    assert schedule.base_schedule.total_steps == recipe.total_steps
    assert [*schedule.base_schedule.lr_curve] == recipe.lr_curve
    assert adascale.scale == 2.0

    other = regression({"total_steps": 12})
    other.optimizer.param_groups[0]["lr"] *= 2
    other.scheduler.base_lrs = [0.02]
    with pytest.raises(ValueError, match="The learning-rate curve is not the recipe's"):
        attach(other.model, other.optimizer, other.scheduler, config, recipe)


def test_the_recipes_settings_are_compared_with_what_the_client_is_said_to_do() -> None:
    recipe = record_recipe(regression, {}, base_batch_size=4, total_steps=12)
    built = regression({"total_steps": 12})
    config = AdaScaleConfig(per_worker_batch_size=4, accumulation=2)
    with pytest.warns(UserWarning, match="found with precision='fp32'"):
        attach(
            built.model,
            built.optimizer,
            built.scheduler,
            replace(config, precision="bf16"),
            recipe,
        )


def test_a_loop_that_cannot_cut_its_batches_says_so() -> None:
    model, optimizer, scheduler = make(10)
    for more in ({"global_batch_size": 64}, {"elastic": True}):
        with pytest.raises(ValueError, match=r"ray_adascale\.Run"):
            attach(model, optimizer, scheduler, settings(10, **more))
    for name, chosen in (("target_efficiency", 0.5), ("batch_schedule", "0:4,50%:16")):
        with pytest.raises(
            ValueError,
            match=rf"{name}=.*{chosen}.*\): .*data loader decides.*ray_adascale\.Run",
        ):
            attach(model, optimizer, scheduler, settings(10, **{name: chosen}))
    with pytest.raises(
        ValueError, match=r"grad_clip='2x'\): here the loop clips.*ray_adascale\.Run"
    ):
        attach(model, optimizer, scheduler, settings(10, grad_clip="2x"))
    with pytest.raises(ValueError, match="sharding='zero2'"):
        attach(
            model, optimizer, scheduler, settings(10, accumulation=2, sharding="zero2")
        )


def test_several_passes_say_that_the_loop_divides_the_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step of the base batch in four passes has the gradient of that batch;
    nothing shows that it is four times too large.
    """
    caplog.set_level(logging.INFO, logger="ray_adascale")
    plain, sgd, _ = make(40)
    x, y = dataset(BATCH).tensors
    loss_of(plain, (x, y)).backward()
    sgd.step()
    model, optimizer, scheduler = make(40)
    adascale, _ = attach(
        model,
        optimizer,
        scheduler,
        settings(40, per_worker_batch_size=BATCH // 4, accumulation=4),
    )
    for part in zip(x.chunk(4), y.chunk(4), strict=True):
        (loss_of(model, part) / 4).backward()
    adascale.step()
    assert adascale.scale == 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    (line,) = caplog.messages
    assert (
        line
        == "Each step has 4 backward passes: the loop or its library must divide each "
        "loss by them."
    )
    attach(*make(40), settings(40))
    assert len(caplog.messages) == 1


def test_sums_over_tokens_have_the_gain_of_their_weights() -> None:
    """As in the guide: each sum is divided by the step's tokens, and the weights are
    set before the last pass.
    """
    tokens = [1, 3, 2, 10]
    x, y = dataset(sum(tokens)).tensors
    parts = [*zip(x.split(tokens), y.split(tokens), strict=True)]
    samples = []
    for part in parts:
        model, optimizer, scheduler = make(40)
        grads = torch.autograd.grad(loss_of(model, part), [*model.parameters()])
        samples.append(torch.cat([g.flatten() for g in grads]).double())
    weights = [t / sum(tokens) for t in tokens]
    mean = sum(w * g for w, g in zip(weights, samples, strict=True))
    norms = sum(w * float(g @ g) for w, g in zip(weights, samples, strict=True))
    squared = float(mean @ mean)  # type: ignore[operator, union-attr]
    scale = 4.0
    sigma2 = scale * (norms - squared) / 3
    mu2 = squared - sigma2 / scale
    expected = (sigma2 + mu2) / (sigma2 / scale + mu2)

    config = settings(40, per_worker_batch_size=BATCH, accumulation=4)
    adascale, _ = attach(model, optimizer, scheduler, config)
    for i, part in enumerate(parts):
        if i == 3:
            adascale.sample_weights = weights
        (loss_of(model, part) * tokens[i] / sum(tokens)).backward()
    adascale.step()
    assert adascale.gain() == pytest.approx(expected, rel=1e-4)
    adascale.sample_weights = weights[:3]
    adascale.zero_grad()
    with pytest.raises(
        RuntimeError,
        match="Set a weight for each pass before the step's last backward pass",
    ):
        for part in parts:
            loss_of(model, part).backward()
    adascale.sample_weights = None
    adascale.zero_grad()
    for part in parts:
        loss_of(model, part).backward()
    with pytest.raises(
        RuntimeError,
        match=r"sample_weights was set after the step's last.*count its tokens",
    ):
        adascale.sample_weights = weights
    model.zero_grad()  # a loop that leaves the step out
    adascale.sample_weights = weights


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("told", [1, 3])
def test_passes_that_the_loop_accumulates_without_a_word_are_refused_at_the_base_batch(
    told: int, zeros: bool
) -> None:
    model, optimizer, scheduler = make(40)
    adascale, _ = attach(model, optimizer, scheduler, settings(40, accumulation=told))
    x, y = dataset(BATCH).tensors

    def step(passes: int) -> None:
        adascale.zero_grad(set_to_none=not zeros)
        for _ in range(passes):
            (loss_of(model, (x, y)) / passes).backward()
        adascale.step()

    step(told)
    loss_of(model, (x, y)).backward()  # gradients that are thrown away
    step(told)
    if told == 1:
        with pytest.raises(
            RuntimeError,
            match=r"3 backward passes .*accumulation=3\).*gradient_accumulation_steps=3",
        ):
            step(3)
    assert adascale.steps == 2


def test_the_passes_of_a_run_of_one_pass_are_watched_at_its_beginning_only() -> None:
    model, optimizer, scheduler = make(40)
    adascale, _ = attach(model, optimizer, scheduler, settings(40))
    x, y = dataset(BATCH).tensors
    for _ in range(11):
        adascale.zero_grad()
        loss_of(model, (x, y)).backward()
        adascale.step()
    assert not next(model.parameters())._backward_hooks


# ---- loops that save and resume ------------------------------------------------------


def timms_loop(
    checkpoint: dict[str, Any], updates: int
) -> tuple[AdaScaleOptimizer, TauSchedule, list[Any]]:
    """timm's train.py, in the documented order: scheduler and attach() above
    resume_checkpoint() and CheckpointSaver().
    """
    model, optimizer, _ = make(40)
    adascale, schedule = attach(
        model, optimizer, Timms(optimizer), settings(40, accumulation=2)
    )
    start = 0
    if checkpoint:  # resume_checkpoint(model, path, optimizer=optimizer)
        model.load_state_dict(checkpoint["state_dict"])
        adascale.load_state_dict(copy.deepcopy(checkpoint["optimizer"]))
        start = checkpoint["updates"]
        schedule.step_update(start)  # as train.py does with start_epoch
    x, y = dataset(160).tensors
    for update in range(start, updates):
        for i in (2 * update, 2 * update + 1):
            (
                loss_of(
                    model,
                    (x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH]),
                )
                / 2
            ).backward()
        adascale.step()
        adascale.zero_grad()
        schedule.step_update(update + 1)
    checkpoint.update(
        state_dict=model.state_dict(), optimizer=adascale.state_dict(), updates=updates
    )
    return adascale, schedule, [p.tolist() for p in model.parameters()]


def test_timms_loop_resumes_in_the_documented_order() -> None:
    whole, _, weights = timms_loop({}, 12)
    saved: dict[str, Any] = {}
    timms_loop(saved, 7)
    resumed, schedule, again = timms_loop(saved, 12)
    assert again == weights
    assert (
        resumed.effective_steps
        == schedule.effective_steps
        == whole.effective_steps
        > 12
    )


@pytest.mark.filterwarnings("ignore:AdaScale is derived for SGD")
@pytest.mark.parametrize("kind", [SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_with_state_of_earlier_steps_needs_a_starting_step(
    kind: Any,
) -> None:
    model, _, _ = make(40)
    optimizer = kind(
        model.parameters(), lr=0.05, **({"momentum": 0.9} if kind is SGD else {})
    )
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    # fresh: Adagrad has state all the same
    attach(model, optimizer, scheduler, settings(40))
    loss_of(model, dataset(4).tensors).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(
        ValueError,
        match=r"has state of earlier steps.*τ would begin at 0.*starting_step=",
    ):
        attach(model, optimizer, scheduler, settings(40))
    adascale, schedule = attach(
        model, optimizer, scheduler, settings(40), starting_step=3
    )
    assert adascale.effective_steps == 3
    assert schedule.get_last_lr() == [0.05 * 0.9**3]
    with pytest.raises(
        ValueError, match="Invalid starting_step=40: the run has 40 effective steps"
    ):
        attach(model, optimizer, scheduler, settings(40), starting_step=40)


def test_a_loaded_learning_rate_does_not_count_as_the_base_runs() -> None:
    model, optimizer, _ = make(40)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer.param_groups[0]["lr"] /= 4  # as optimizer.load_state_dict() leaves it
    with pytest.raises(ValueError, match="has loaded those of another step"):
        attach(model, optimizer, scheduler, settings(40), starting_step=2)


def test_a_scheduler_like_timms_that_was_stepped_is_refused() -> None:
    model, optimizer, _ = make(40)
    scheduler = Timms(optimizer)
    scheduler.step_update(1)
    with pytest.raises(ValueError, match=r"Timms was stepped already.*fresh scheduler"):
        attach(model, optimizer, scheduler, settings(40))


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as its users copy it: two steps of its own around
    a second backward pass.
    """

    def __init__(
        self, params: Any, base: Any, rho: float = 0.05, **settings: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=float(self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.base_optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


def sam_steps(sam: SAM, model: nn.Module, steps: int) -> torch.Tensor:
    for i in range(steps):
        for own_step in (sam.first_step, sam.second_step):
            x = torch.linspace(-1, 1, 30).view(10, 3) + i
            model(x).square().mean().backward()
            own_step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_an_optimizer_whose_own_steps_go_past_the_wrapper_is_warned_of() -> None:
    def built() -> tuple[nn.Module, SAM]:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        return model, SAM(model.parameters(), SGD, lr=0.1, momentum=0.9)

    config = AdaScaleConfig(base_batch_size=10, total_steps=8)
    model, sam = built()
    with pytest.warns(UserWarning, match="not with SAM"):
        adascale, schedule = attach(model, sam, None, config)
    advice = r"inner, schedule = attach\(model, optimizer\.base_optimizer, \.\.\.\); optimizer\.base_optimizer = inner\."
    with pytest.warns(
        UserWarning, match=rf"SGD\.step\(\) has run 5 times.*τ stays at 0, .*{advice}"
    ) as told:
        sam_steps(adascale, model, 8)  # type: ignore[arg-type]
    assert len(told) == 1
    model, sam = built()
    with pytest.warns(
        UserWarning, match=rf"step\(\) of the AdaScale around it not once.*{advice}"
    ):
        sam_steps(AdaScale(sam, num_gradients_to_accumulate=2), model, 8)  # type: ignore[arg-type]
    model, sam = built()
    expected = sam_steps(sam, model, 8)
    model, sam = built()  # as the warning says
    sam.base_optimizer, schedule = attach(model, sam.base_optimizer, None, config)
    assert torch.equal(sam_steps(sam, model, 8), expected)
    assert schedule.finished


def test_a_loop_that_steps_the_bare_optimizer_is_told() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=10, total_steps=8)
    _attached = attach(model, optimizer, None, config)  # else it may be collected
    model(torch.ones(10, 3)).sum().backward()
    with pytest.warns(
        UserWarning,
        match=r"SGD\.step\(\) has run 5 times.*Call step\(\) of what attach",
    ):
        [optimizer.step() for _ in range(6)]


def test_a_loop_whose_loss_is_of_another_model_is_told() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    adascale, _ = attach(
        model,
        SGD(model.parameters(), lr=0.1),
        None,
        AdaScaleConfig(base_batch_size=2, total_steps=8),
    )
    other(torch.ones(2, 3)).sum().backward()
    with pytest.warns(
        UserWarning,
        match=r"finds no gradient\. Compute the loss from the model that attach",
    ):
        adascale.step()
    adascale.step()  # once


def test_an_optimizer_that_is_attached_again_keeps_no_former_wrapper() -> None:
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=2, total_steps=8)
    former = weakref.ref(attach(model, optimizer, None, config)[0])
    gc.collect()
    assert former() is None
    assert attach(model, optimizer, None, config)[0].wrapped is optimizer


def test_a_pass_within_a_closure_is_no_step_without_a_gradient() -> None:
    """Lightning makes the last pass of a step so. Warnings are errors here."""
    model = nn.Linear(3, 1)
    adascale, _ = attach(
        model,
        SGD(model.parameters(), lr=0.1),
        None,
        AdaScaleConfig(base_batch_size=2, total_steps=8),
    )

    def closure() -> float:
        adascale.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss.item()

    adascale.step(closure)


def test_an_epoch_is_that_of_a_run_with_drop_last() -> None:
    """62 steps before, in place of 60, and a recipe was refused with the advice to
    use the same dataset.
    """
    model, optimizer, _ = make(100)
    settings = {"base_batch_size": 16, "total_epochs": 10, "dataset_length": 100}
    totals = []
    for drop_last in (False, True):
        config = AdaScaleConfig(drop_last=drop_last, **settings)  # type: ignore[arg-type]
        _, schedule = attach(model, optimizer, None, config)
        assert schedule.base_schedule.base_steps_per_epoch == (6 if drop_last else 6.25)
        totals.append(schedule.base_schedule.total_steps)
    assert totals == [62, 60]


def test_networks_that_train_in_turn_have_a_clock_each() -> None:
    """The loop of a Wasserstein GAN, with two steps of the critic for one of the
    generator, is the plain one at S = 1.
    """

    def trained(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        generator, critic = (
            nn.Linear(2, 3),
            nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)),
        )
        steppers: list[Any] = []
        for network, steps in ((generator, 4), (critic, 8)):
            optimizer: torch.optim.Optimizer = torch.optim.RMSprop(
                network.parameters(), lr=0.01
            )
            if attached:
                config = AdaScaleConfig(
                    base_batch_size=8, total_steps=steps, rule="unscaled"
                )
                optimizer, _ = attach(network, optimizer, None, config)
            steppers.append(optimizer)
        noise = torch.Generator().manual_seed(2)
        for step in range(12):
            stepper = steppers[step % 3 != 2]
            real, fake = torch.ones(8, 3), generator(torch.randn(8, 2, generator=noise))
            loss = (
                -critic(fake).mean()
                if stepper is steppers[0]
                else critic(fake.detach()).mean() - critic(real).mean()
            )
            for each in steppers:
                each.zero_grad()
            loss.backward()
            stepper.step()
        return [
            p.detach() for network in (generator, critic) for p in network.parameters()
        ]

    assert all(map(torch.equal, trained(True), trained(False)))
    two: Any = [SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2)]
    with pytest.raises(
        ValueError,
        match=r"as a GAN's, have a clock each: one attach\(\) for each network",
    ):
        attach(
            nn.Linear(1, 1), two, None, AdaScaleConfig(base_batch_size=1, total_steps=1)
        )
