"""From model and optimizer as the user built them to those of a run: checked, against the recipe too, and wrapped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._warn import warn_at_user
from ..checkpoint.optimizer import parameter_names
from ..config import AdaScaleConfig, BatchPlan
from ..optim.adam_metric import adam_preconditioner
from ..optim.adascale import AdaScale
from ..optim.rules import AdamScaleRule, AdaScaleRule, ScalingRule, make_rule, metric_of
from ..recipe import Recipe
from ..sharding.oss import OSS
from ..sharding.partition import has_state
from ..sharding.sharded_ddp import ShardedDataParallel
from .schedule import BaseSchedule, curve_difference, other_length

__all__ = ["Wrapped", "adascale_of", "check_built", "check_recipe", "check_rule", "check_schedule", "wrap"]


@dataclass(frozen=True)
class Wrapped:
    """What :func:`wrap` made.

    Attributes:
        model: The one to call.
        optimizer: The one to step.
        parameter_names: Name of each of its parameters in the bare model, as checkpoints have them.
        scaler: Scales the loss; None unless precision is "fp16".
        sharding: What "auto" came to.
    """

    model: nn.Module
    optimizer: AdaScale
    parameter_names: dict[Tensor, str]
    scaler: torch.amp.GradScaler | None
    sharding: str


def check_built(model: nn.Module, optimizer: Optimizer, config: AdaScaleConfig) -> None:
    """Whether model and optimizer are bare, and one each.

    Raises:
        ValueError: They are not; says what to pass.
    """
    if isinstance(optimizer, list | tuple | dict):
        raise ValueError(
            f"Invalid optimizer: a {type(optimizer).__name__} of {len(optimizer)}. Only one is supported: there is one gain "
            "and one clock. Make one optimizer with several parameter groups."
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"Invalid optimizer of type {type(optimizer).__name__}. Must be a torch.optim.Optimizer.")
    if isinstance(model, DistributedDataParallel | ShardedDataParallel):
        raise ValueError("Pass the bare model: it is wrapped for data parallelism here.")
    if isinstance(optimizer, AdaScale | OSS):
        raise ValueError(f"Pass the bare optimizer: it is wrapped here, and {type(optimizer).__name__} would be twice.")
    rule = make_rule(config.rule)
    doubt = _doubt(rule, optimizer)
    if doubt is not None:
        warn_at_user(doubt)


def _doubt(rule: ScalingRule, optimizer: Optimizer) -> str | None:
    """What speaks against the rule with this optimizer, and what is known; None for SGD, which AdaScale is derived for."""
    name = type(optimizer).__name__
    if isinstance(rule, AdamScaleRule):
        return (
            "rule='adamscale' is experimental: schedules did not carry over with it where they did with rule='adascale' and the "
            "same AdamW (docs/adam.md). Take 'adascale', or compare with a base run before you trust it."
        )
    if not isinstance(rule, AdaScaleRule) or isinstance(optimizer, SGD):
        return None
    if isinstance(optimizer, Adam | AdamW):
        return (
            f"AdaScale is derived for SGD. With {name} there is no proof; that schedules carry over was measured, on four small "
            "workloads (docs/adam.md)."
        )
    return (
        f"AdaScale is derived for SGD, and was measured with Adam's kind (docs/adam.md); with {name} it was not tried. The run "
        "goes on; compare with a base run before you trust it."
    )


def check_recipe(recipe: Recipe, schedule: BaseSchedule) -> None:
    """Whether the schedule that was built is the recipe's.

    Raises:
        ValueError: It is not; says where it differs.
    """
    unit, per_epoch = schedule.scheduler_unit, schedule.base_steps_per_epoch
    if unit != recipe.scheduler_unit:
        raise ValueError(f"Invalid scheduler_unit={unit!r}: the recipe was found with {recipe.scheduler_unit!r}.")
    if unit == "epoch" and per_epoch != recipe.base_steps_per_epoch:
        raise ValueError(
            f"The dataset has {per_epoch} base steps an epoch, the recipe's had {recipe.base_steps_per_epoch}: the "
            "schedule would move at other steps. Use the same dataset, or search anew."
        )
    difference = curve_difference(recipe.lr_curve, schedule.lr_curve)
    if difference is not None:
        raise ValueError(
            f"The learning-rate curve is not the recipe's: {difference}. Build optimizer and scheduler from the "
            "hyperparameters that the function is given, as in the search; or search anew."
        )


def check_schedule(scheduler: LRScheduler | None, schedule: BaseSchedule) -> list[str]:
    """What one may doubt of a schedule that can be followed all the same; a sentence each, and usually none."""
    found = [other_length(scheduler, schedule)]
    per_epoch, base = schedule.base_steps_per_epoch, schedule.base_batch_size
    if per_epoch is not None and per_epoch < 1:
        found.append(
            f"The base batch of {base} is larger than the dataset of {per_epoch * base:.0f} examples: a step takes some of "
            "them twice, and the noise of the batch is less than its size says. Lower base_batch_size."
        )
    return [sentence for sentence in found if sentence is not None]


def check_rule(config: AdaScaleConfig, curve: list[list[float]]) -> None:
    """Have the scaling rule warn where the schedule does what it does itself: LEGW brings a warm-up."""
    check = getattr(make_rule(config.rule), "check_curve", None)  # a plain callable has none
    if check is not None:
        check(curve)


def wrap(
    module: nn.Module,
    optimizer: Optimizer,
    config: AdaScaleConfig,
    plan: BatchPlan,
    *,
    device: torch.device,
    total_steps: int,
) -> Wrapped:
    """Wrap a bare model, on its device already, and its optimizer as ``config.sharding`` says. All workers together.

    Raises:
        ValueError: Sharding, rule, precision or optimizer don't go together.
    """
    names = parameter_names(module, optimizer)
    rule = make_rule(config.rule)
    adam = metric_of(rule) == "adam"
    sharding = _choose_sharding(config, plan.world_size, optimizer, adam=adam)
    model = module
    if sharding == "fsdp2":
        if config.precision == "fp16":
            raise ValueError("AdaScaleConfig(sharding='fsdp2', precision='fp16') is not supported. Use 'bf16'.")
        from ..sharding.fsdp2 import shard_model  # here, since DTensor takes most of a second to import

        shard_model(module, optimizer, device)
        names = parameter_names(module, optimizer)
    if sharding in ("oss", "zero2"):
        optimizer = OSS.wrap(optimizer)
    if sharding == "zero2":
        model = ShardedDataParallel(module, optimizer)
    elif plan.world_size > 1 and sharding != "fsdp2":
        model = _data_parallel(module, device, find_unused=config.find_unused_parameters, workers=plan.world_size)
    scaler = None
    if config.precision == "fp16":
        from ..optim.grad_scaler import ShardedGradScaler  # likewise

        scaler = ShardedGradScaler(device=device.type)
    adascale = adascale_of(
        optimizer,
        config,
        plan,
        total_steps=total_steps,
        grad_scaler=scaler,
        model=module if sharding == "fsdp2" else None,
    )
    return Wrapped(model, adascale, names, scaler, sharding)


def adascale_of(
    optimizer: Optimizer,
    config: AdaScaleConfig,
    plan: BatchPlan,
    *,
    total_steps: int,
    grad_scaler: torch.amp.GradScaler | None,
    model: nn.Module | None = None,
) -> AdaScale:
    """An optimizer under AdaScale as every run has it: one gain for all groups, averaged over effective time."""
    rule = make_rule(config.rule)
    return AdaScale(
        optimizer,
        model=model,
        world_size=plan.world_size,
        num_gradients_to_accumulate=plan.accumulation,
        grad_scaler=grad_scaler,
        clip="averages",
        averaging_window=config.averaging_window,
        total_steps=total_steps,
        single_gain=True,
        base_batch_size=plan.base_batch_size,
        batch_size=plan.global_batch_size,
        rule=rule,
        precondition=adam_preconditioner(optimizer) if metric_of(rule) == "adam" else None,
    )


def _choose_sharding(config: AdaScaleConfig, workers: int, optimizer: Optimizer, *, adam: bool) -> str:
    if adam and config.sharding not in ("auto", "none"):
        raise ValueError(
            f"Invalid AdaScaleConfig(sharding={config.sharding!r}) with the rule AdamScale: its statistics need Adam's "
            "state of every parameter on every worker. Use sharding='none', or 'auto', which chooses it."
        )
    if adam or workers == 1:
        return "none"
    if config.sharding == "auto":
        return "zero2" if has_state(optimizer) else "none"
    return config.sharding


# Process groups, until the process ends. In torch 2.13 a DistributedDataParallel that outlives destroy_process_group() and is
# the last to know its gloo group now and then hangs in its destructor.
_KEPT: list[dist.ProcessGroup | None] = []


def _data_parallel(
    module: nn.Module, device: torch.device, *, find_unused: bool, workers: int
) -> DistributedDataParallel:
    model = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
    )
    group = dist.group.WORLD
    if "gloo" in dist.get_backend_config() and group not in _KEPT:
        _KEPT.append(group)
    if workers > 2 and not find_unused:
        _settle_buckets(model)
    return model


class _EveryParameter(nn.Module):
    """A forward pass that uses every parameter, and has zero for its gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module  # DDP wants its buffers

    def forward(self, _: Tensor) -> Tensor:
        used = [p for p in self.module.parameters() if p.requires_grad]
        return torch.stack([(p.flatten()[:1] * 0).sum().float() for p in used]).sum()


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Have DDP regroup its buckets now, in an order that depends on the parameters alone.

    It does so once, after its first backward pass, by the order in which gradients came. So the first step after a start
    sums over workers in another order than that step did in a run that was never stopped; from three workers on that
    shows in the last bit. A backward pass through a stand-in is the only way to have it behind us: the user's own needs
    their loss. Gradients come in reverse order of the parameters then, which is what most models do.
    """
    module = model.module
    model.module = _EveryParameter(module)
    try:
        model(torch.zeros(())).backward()  # with device_ids, DDP insists on an input
    finally:
        model.module = module
    model.zero_grad()
