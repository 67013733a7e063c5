"""ShardedDataParallel: every gradient is sent to the worker that owns it, and to no other. FairScale's name and constructor.

A parameter's gradient is complete when its last backward function has run. When all gradients of a bucket are complete, they
are copied into one flat buffer, their norm is taken for AdaScale (if each pass is a step), and the shards are sent to their
owners while the backward pass goes on. After it every worker holds 1/N of the gradient. The sending is in
:mod:`ray_adascale.sharding.reduction`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import as_bytes, global_rank
from .collectives import send_from_first
from .oss import OSS
from .reduction import GradientReduction


class ShardedDataParallel(nn.Module):
    """Data parallelism over sharded optimizer state: each worker gets the mean gradient of its share alone.

    Use it in place of ``DistributedDataParallel``::

        optimizer = OSS(model.parameters(), optim=SGD, lr=0.1, momentum=0.9)
        model = ShardedDataParallel(model, optimizer)

    The traffic of a step is that of one all-reduce (half of it for gradients, half for updated parameters). After a
    backward pass ``param.grad`` is None everywhere: the gradient of this worker's share is with the optimizer. Clip with
    ``optimizer.clip_grad_norm``, scale the loss with :class:`ray_adascale.ShardedGradScaler`, clear gradients with
    ``zero_grad()`` of the optimizer or of this module. ``optimizer.step()`` consumes them.

    Args:
        module: The model, on its device.
        sharded_optimizer: The :class:`ray_adascale.OSS` of its parameters, bare or in AdaScale, or a list of this one. Every
            trainable parameter must be in it.
        process_group: Must be the optimizer's. Default: the optimizer's.
        broadcast_buffers: Rank 0's buffers go to all before the first forward pass of a step, in training mode. Parameters that
            are frozen from the beginning are not sent, see :class:`ray_adascale.OSS`.
        sync_models_at_startup: Rank 0's parameters and buffers go to all now.
        reduce_buffer_size: Accepted for FairScale's sake; the size of a bucket is the optimizer's.
        auto_refresh_trainable: Look at every forward pass for parameters that were unfrozen or added; else call
            :meth:`refresh_trainable`.
        reduce_fp16: Send gradients as fp16.
        warn_on_trainable_params_changed: Accepted for FairScale's sake; nothing has to be rebuilt.

    Raises:
        TypeError: There is no sharded optimizer.
        ValueError: A trainable parameter has no optimizer, the optimizer has another model or process group, or several
            optimizers are given.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Any = None,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        super().__init__()
        optimizer = _sharded(sharded_optimizer)
        sharded_over = dist.group.WORLD if optimizer.group is None and dist.is_available() else optimizer.group
        if process_group is not None and process_group is not sharded_over:
            raise ValueError("The process group must be that of the sharded optimizer: OSS(..., group=group).")
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.auto_refresh_trainable = auto_refresh_trainable
        self._group = optimizer.group
        self._world_size = optimizer.world_size
        self._reduction = GradientReduction(optimizer, torch.float16 if reduce_fp16 else None)
        self.hook_last = self._reduction.hook_last
        self._params: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._sent_at = -1  # the number of reductions when buffers were last sent
        self.refresh_trainable()
        if sync_models_at_startup and self._world_size > 1:
            for bucket in optimizer.buckets:
                bucket.bind()
                dist.broadcast(as_bytes(bucket.flat), global_rank(self._group, 0), group=self._group)
            known = {p for bucket in optimizer.buckets for p in bucket.params}
            send_from_first([*(p for p in module.parameters() if p not in known), *module.buffers()], self._group)
        optimizer.attach_reducer(self._reduction)

    # ---- as in DistributedDataParallel ---------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._world_size > 1:
            if self.auto_refresh_trainable:
                self.follow()
            if self.training and torch.is_grad_enabled():
                # Once a step: a second forward pass before the backward pass needs the buffers of the first unchanged.
                if self.broadcast_buffers and self._sent_at != self._reduction.reductions:
                    send_from_first(
                        [b for part in self._with_buffers for b in part.buffers(recurse=False)], self._group
                    )
                self._sent_at = self._reduction.reductions
        return self.module(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute for a name that the wrapper lacks, as FairScale does."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, nor has its module, of type "
                f"{type(module).__name__!r}.",
                name=name,
                obj=self,
            ) from error

    @property
    def device_type(self) -> str:
        """Type of the device of the module's parameters, such as "cuda"; that of the first one if they differ."""
        return next((p.device.type for p in self.module.parameters()), "cpu")

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on more than one device."""
        return len({p.device for p in self.module.parameters()}) > 1

    def reduce(self) -> None:
        """Send the gradients that passes in :meth:`no_sync` left on this worker to their owners, now. Collective.

        If no worker has any left, it does nothing; to know that, the workers exchange one number.

        It need not be called: the next backward pass outside ``no_sync`` sends them, and so does ``optimizer.step()``.
        A worker whose passes reached no parameter takes part with a gradient of zero.

        Raises:
            RuntimeError: Called between the passes of an optimizer step of AdaScale; it is for after the last one.
        """
        if self._world_size == 1:
            return
        self._reduction.complete("reduce")
        if not self._reduction.reduced:
            self._reduction.reduce()
        # A pass in no_sync() may have come after one that was reduced, or on some workers only.
        left = torch.tensor([float(self._reduction.unsent())], device=self._reduction.device)
        dist.all_reduce(left, dist.ReduceOp.MAX, group=self._group)
        if left.item():
            self._reduction.reduce()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Send rank 0's buffers to all workers, now. Collective.

        Args:
            blocking: Accepted for FairScale's sake; the buffers have arrived when this returns.
        """
        if self._world_size > 1:
            send_from_first(list(self.module.buffers()), self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes in this context on this worker; the next pass outside sends them with its own.

        ``optimizer.step()`` raises RuntimeError if a pass in this context came after the last one outside, unless :meth:`reduce`
        was called. If all passes of a step are in this context, ``step()`` sends their gradients.
        """
        before, self._reduction.syncing = self._reduction.syncing, False
        try:
            yield
        finally:
            self._reduction.syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self._reduction.discard()

    def refresh_trainable(self) -> None:
        """Find parameters that were unfrozen, or added to the optimizer, since the last call.

        Raises:
            ValueError: A trainable parameter of the module is not in the optimizer.
        """
        if self._world_size == 1:
            return
        self._params = list(self.module.parameters())
        # As in DDP, a module that has no buffer yet is skipped.
        self._with_buffers = [part for part in self.module.modules() if any(True for _ in part.buffers(recurse=False))]
        self._trainable = [p.requires_grad for p in self._params]
        self._reduction.refresh()
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in self._reduction:
                raise ValueError(
                    f"The parameter {name!r} is trainable and in no sharded optimizer, so its gradient would never be "
                    "reduced. Give it to OSS (add_param_group), or freeze it."
                )

    def follow(self) -> None:
        """Refresh if a parameter was frozen, unfrozen, or added to the optimizer."""
        if [p.requires_grad for p in self._params] != self._trainable or not self._reduction.has_all_buckets:
            self.refresh_trainable()


ShardedDDP = ShardedDataParallel


def _sharded(optimizer: Any) -> OSS:
    """Return the OSS in an optimizer.

    Raises:
        TypeError: There is none.
        ValueError: Several optimizers are given.
    """
    if isinstance(optimizer, list | tuple):
        if len(optimizer) == 1:
            return _sharded(optimizer[0])
        raise ValueError(
            f"Invalid sharded_optimizer: a {type(optimizer).__name__} of {len(optimizer)}. Must be one. Give OSS several "
            "parameter groups, OSS([{'params': ..., 'lr': ...}, ...], optim=...), or make optimizers of several classes one: "
            "OSS.wrap(OptimizerChain([...])). Several OSS work under torch's DistributedDataParallel."
        )
    inner = getattr(optimizer, "wrapped", optimizer)  # AdaScale's, which this module does not import
    if not isinstance(inner, OSS):
        what = "none was given" if optimizer is None else f"got {type(optimizer).__name__}"
        raise TypeError(
            f"ShardedDataParallel(module, sharded_optimizer) needs the sharded optimizer of the module's parameters ({what}): "
            "make it first, as in OSS(module.parameters(), optim=torch.optim.SGD, lr=0.1), or OSS.wrap(optimizer)."
        )
    return inner
