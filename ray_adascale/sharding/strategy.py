"""How the gradients of a model travel: one object for each kind of sharding, which the passes of a step call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._errors import listed
from .collectives import send_from_first
from .sharded_ddp import ShardedDataParallel

_NOT_CALLED = (
    "run.model(...) was not called in the last pass of a step, so the workers would not exchange gradients. Call run.model(...) "
    "in place of the bare model, also in a loss that has the model. Only its forward() counts: let forward() call the model's "
    "other methods, or use AdaScaleConfig(sharding='zero2'), which reduces gradients whichever method is called."
)

NOT_REACHED = (
    "In run.backward(loss): no gradient has reached a parameter of the model. Compute the loss from run.model(...), and give the "
    "run the model that is to be trained."
)

_requires_grad = attrgetter("requires_grad")


class Sharding:
    """One worker: nothing travels. Base class of the others.

    Args:
        model: The model to call.
        module: The bare model.
    """

    copies = True
    """Whether each worker has a copy of the weights."""

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        self._model, self._module, self._reached = cast(Any, model), module, False

    def in_pass(self, last: bool) -> AbstractContextManager[object] | None:
        """Return the context of a pass, from its forward pass on, if it needs one. The step's last pass reduces gradients."""
        return None

    def before_last(self) -> None:
        """Check that the step's last backward pass will reduce the gradients of all trainable parameters.

        Raises:
            RuntimeError: It will not.
        """

    def after_last(self) -> None:
        """Called when the last backward pass has run, before the loop sees the gradients.

        Raises:
            RuntimeError: The first step has no gradient at all.
        """
        self._reached = self._reached or any(p.grad is not None for p in self._module.parameters())
        if not self._reached:
            raise RuntimeError(NOT_REACHED)

    def before_step(self) -> None:
        """Called before the optimizer steps."""


class Copies(Sharding):
    """torch's DistributedDataParallel: each worker has the whole gradient (``sharding="none"`` and ``"oss"``)."""

    def __init__(self, model: DistributedDataParallel, module: nn.Module) -> None:
        super().__init__(model, module)
        self._params, self._called = list(module.parameters()), False
        self._built = [*map(_requires_grad, self._params)]
        model.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, *_: object) -> None:
        self._called = self._called or torch.is_grad_enabled()

    def in_pass(self, last: bool) -> AbstractContextManager[object] | None:
        self._called = False
        return None if last else cast(AbstractContextManager[object], self._model.no_sync())

    def before_last(self) -> None:
        if not self._called:
            raise RuntimeError(_NOT_CALLED)
        trainable, finds_unused = [*map(_requires_grad, self._params)], self._model.find_unused_parameters
        if trainable == self._built:
            return
        changed = [
            name
            for (name, _), now, built in zip(self._module.named_parameters(), trainable, self._built, strict=True)
            if now > built or (now < built and not finds_unused)
        ]
        if changed:
            raise RuntimeError(
                f"The loop has frozen or unfrozen {listed(changed)}. DistributedDataParallel reduces gradients of what was "
                "trainable when the run was built. Use AdaScaleConfig(sharding='zero2'), which follows. Or build the run with "
                "all of them trainable and find_unused_parameters=True, and freeze layers afterwards."
            )


class GradientStandIn(Tensor):
    """A gradient that other workers have: a tensor without data that raises at any use, where None would be skipped in silence.

    With sharded gradients a parameter's ``.grad`` is None after the last backward pass of a step, since its owner has it.
    ``torch.nn.utils.clip_grad_norm_`` would find no gradient, return 0 and clip nothing.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise RuntimeError(
            "This gradient is sharded: after the last backward pass of a step each worker has its own part of it. To clip, use "
            "run.clip_grad_norm_() or run.clip_grad_value_() in place of torch's, or AdaScaleConfig(grad_clip=...). To read or "
            "change gradients in the loop, use AdaScaleConfig(sharding='oss') or 'none', which leave them whole on each worker."
        )


class Owners(Sharding):
    """ShardedDataParallel: each gradient is with its owner after the last pass (``sharding="zero2"``)."""

    def __init__(self, model: ShardedDataParallel, module: nn.Module) -> None:
        super().__init__(model, module)
        self._params, self._hooked = list(module.parameters()), False

    def in_pass(self, last: bool) -> AbstractContextManager[object] | None:
        if not self._hooked:  # the user's hooks are registered by now
            self._model.hook_last()
            self._hooked = True
        return None if last else self._model.no_sync()

    def before_last(self) -> None:
        self._model.follow()  # as its forward pass does, which the loop need not call

    def after_last(self) -> None:
        for p in self._params:
            if p.grad is None and p.requires_grad:
                p.grad = p.new_empty(()).expand(p.shape).as_subclass(GradientStandIn)

    def before_step(self) -> None:
        for p in self._params:
            if type(p.grad) is GradientStandIn:
                p.grad = None


class Whole(Sharding):
    """``fully_shard``: each worker has its shard of weights and gradients (``sharding="fsdp2"``)."""

    copies = False

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        super().__init__(model, module)
        saved = {id(value) for value in module.state_dict(keep_vars=True).values()}
        self._buffers = [name for name, b in module.named_buffers() if id(b) in saved]
        self._begins = True

    def in_pass(self, last: bool) -> None:
        self._model.set_requires_gradient_sync(last)
        if self._begins:  # as DistributedDataParallel does, but without buffers that no checkpoint has, such as masks
            self._model.reshard()  # an evaluation in the loop leaves it whole, and an optimizer's eval() changes its shards
            send_from_first([self._module.get_buffer(name) for name in self._buffers])
        self._begins = last


def sharding_of(model: nn.Module, module: nn.Module, kind: str) -> Sharding:
    """Return the object for a model that is wrapped for a kind of sharding."""
    if kind == "fsdp2":
        return Whole(model, module)
    if isinstance(model, ShardedDataParallel):
        return Owners(model, module)
    return Copies(model, module) if isinstance(model, DistributedDataParallel) else Sharding(model, module)
