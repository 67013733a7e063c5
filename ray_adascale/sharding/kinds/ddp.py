"""torch's DistributedDataParallel: each worker has the whole weights and, after a
step's last pass, the whole gradient.

It is ``sharding="none"`` with several workers. With the state of the optimizer in an
OSS it is ``sharding="oss"``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..._errors import listed
from ...measure.observers import GradientObserver, HookObserver, PassListener
from .sharding import Sharding, Wanted

_requires_grad = attrgetter("requires_grad")

_NOT_CALLED = (
    "run.model(...) was not called in the last pass of a step, so the workers would "
    "not exchange gradients. Call run.model(...) in place of the bare model, also in a "
    "loss that has the model. Only its forward() counts: let forward() call the "
    "model's other methods, or use AdaScaleConfig(sharding='zero2'), which reduces "
    "gradients whichever method is called."
)


class DataParallel(Sharding):
    """Gradients that a DistributedDataParallel reduces."""

    model: DistributedDataParallel | None

    def __init__(self, optimizer: Optimizer, model: DistributedDataParallel) -> None:
        super().__init__(optimizer, model)
        self._called = False
        self._without_traffic = ExitStack()

    # ---- before the first step -------------------------------------------------------

    def check(self) -> None:
        """Check that DistributedDataParallel reduces the gradients of all parameters.

        Raises:
            ValueError: It ignores or delays some of them.
        """
        if self.model is None or not self.model.parameters_to_ignore:
            return
        own = set(self.params)
        ignored = [
            name
            for name, p in self.model.module.named_parameters()
            if name in self.model.parameters_to_ignore and p in own and p.requires_grad
        ]
        if ignored:
            raise ValueError(
                "DistributedDataParallel does not reduce the gradients of "
                f"{listed(ignored)} with the others. Ignored parameters would step "
                "apart on the workers, and delayed ones can't be measured. Leave them "
                "out of _ddp_params_and_buffers_to_ignore and of "
                "delay_all_reduce_named_params, or freeze them."
            )

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        if wanted.precondition is not None:
            self.state.check_precondition()
        reducing = None if self.model is None else _Reducing(self.model)
        return HookObserver(
            self.groups,
            listener,
            local=wanted.local,
            precondition=wanted.precondition,
            reducing=reducing,
        )

    def drive(self, module: nn.Module) -> None:
        assert self.model is not None
        self._module = module
        self._all = list(module.parameters())
        self._trainable_when_built = [*map(_requires_grad, self._all)]
        self.model.register_forward_pre_hook(self._on_forward)

    # ---- a pass ----------------------------------------------------------------------

    def begin_pass(self, *, last: bool) -> None:
        self._called = False
        if not last and self.model is not None:
            self._without_traffic.enter_context(self.model.no_sync())

    def _on_forward(self, *_: object) -> None:
        self._called = self._called or torch.is_grad_enabled()

    def check_last_pass(self) -> None:
        assert self.model is not None
        if not self._called:
            raise RuntimeError(_NOT_CALLED)
        trainable = [*map(_requires_grad, self._all)]
        if trainable == self._trainable_when_built:
            return
        changed = []
        for (name, _), now, built in zip(
            self._module.named_parameters(),
            trainable,
            self._trainable_when_built,
            strict=True,
        ):
            unfrozen = now and not built
            frozen = built and not now
            if unfrozen or (frozen and not self.model.find_unused_parameters):
                changed.append(name)
        if changed:
            raise RuntimeError(
                f"The loop has frozen or unfrozen {listed(changed)}. "
                "DistributedDataParallel reduces gradients of what was trainable when "
                "the run was built. Use AdaScaleConfig(sharding='zero2'), which "
                "follows. Or build the run with all of them trainable and "
                "find_unused_parameters=True, and freeze layers afterwards."
            )

    def end_pass(self) -> None:
        self._without_traffic.close()


class _Reducing:
    """How a DistributedDataParallel reduces gradients, for an observer that looks
    on. It holds the model weakly.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)

    def in_one_round(self) -> bool:
        # A communication hook may start further collectives when the first ones have
        # ended (PowerSGD does), at a time that differs between workers. AdaScale's must
        # then come after DDP's wait, or workers may differ in their order. torch has no
        # public name for the hooks that were passed to register_comm_hook.
        model = self._model()
        return model is None or not model._comm_hooks

    def check_unused(self, unused: Sequence[Tensor]) -> None:
        model = self._model()
        if (
            not unused
            or model is None
            or not model.require_backward_grad_sync
            or model.find_unused_parameters
            or model.static_graph
        ):
            return
        # DDP would wait for their gradients, leave others unreduced, and raise in the
        # next forward pass.
        raise RuntimeError(
            f"A step's last backward pass gave no gradient to {_names(model, unused)}. "
            "DistributedDataParallel then leaves other gradients unreduced. Use "
            "AdaScaleConfig(find_unused_parameters=True), in a loop of your own the "
            "argument of DistributedDataParallel; or sharding='zero2', which needs "
            "none; or freeze them before the run."
        )

    def check_cast(self, params: Sequence[Tensor]) -> None:
        if (model := self._model()) is not None:
            raise RuntimeError(
                f"The loop has cast, moved or resized {_names(model, params)}. "
                "DistributedDataParallel would leave their gradients unreduced. Change "
                "the model before the run, or DistributedDataParallel, is built; "
                "sharding='zero2' follows casts and moves."
            )


def _names(model: DistributedDataParallel, params: Sequence[Tensor]) -> str:
    return listed(
        [
            name
            for name, p in model.module.named_parameters()
            if any(p is one for one in params)
        ]
    )


# ---- wrapping a model ----------------------------------------------------------------

# References to process groups, held until the process ends. In torch 2.13 a
# DistributedDataParallel that outlives destroy_process_group() and holds the last
# reference to its gloo group sometimes hangs in its destructor.
_KEPT: list[dist.ProcessGroup | None] = []


def data_parallel(
    module: nn.Module, device: torch.device, *, find_unused: bool, workers: int
) -> DistributedDataParallel:
    """Wrap a bare model for a run. Collective."""
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
    """A stand-in for the model: its forward pass uses every parameter, with
    gradients of zero.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module  # DDP needs the buffers

    def forward(self, _: Tensor) -> Tensor:
        used = [p for p in self.module.parameters() if p.requires_grad]
        return torch.stack([(p.flatten()[:1] * 0).sum().float() for p in used]).sum()


def _settle_buckets(model: DistributedDataParallel) -> None:
    """Make DDP regroup its buckets now, in an order that depends on the parameters
    alone.

    DDP regroups them once, after its first backward pass, by the order in which
    gradients were computed. So the first step after a start would sum over workers in
    another order than the same step of a run that was never stopped, which from three
    workers on changes the last bit. A backward pass through a stand-in makes DDP
    regroup them now. The model itself can't be used, because it needs the user's loss.
    The stand-in's gradients come in reverse order of the parameters, as those of most
    models.
    """
    module = model.module
    model.module = _EveryParameter(module)
    try:
        model(torch.zeros(())).backward()  # with device_ids, DDP requires an input
    finally:
        model.module = module
    model.zero_grad()
