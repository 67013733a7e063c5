"""OSS: optimizer state sharded over workers. Each worker holds and updates its share,
and sends the updated parameters.

FairScale's name and constructor. Parameters lie in flat buckets
(:mod:`ray_adascale.sharding.buckets`). An optimizer that is known to treat every
element by itself is split by element, so that every worker holds exactly 1/N. Any other
one is split by whole parameters, which is right for every optimizer that treats each
parameter by itself. In a chain each optimizer's parameters are split in its own way.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from .. import _hooks
from .._torch import called_to_make_state
from ..chain import OptimizerChain, check_sizes, empty_copy, parts_of
from ..measure.norms import stored_numbers, take_norm, with_dense_gradients
from .buckets import Bucket, Fragment
from .collect_state import EVERYONE, collect_state
from .collectives import gather_shards, norm_over_workers
from .known_groups import KnownGroups
from .partition import (
    TORCHS,
    Owners,
    check_optimizer,
    check_shardable,
    divide,
    is_elementwise,
)
from .share_state import (
    NOT_COLLECTED,
    ShareState,
    copy_hyperparameters,
    copy_of,
    make_state,
    packed,
    share_of,
)
from .shared_memory import shared_by_parameters

TIE = (
    "To tie weights, make them one parameter: head.weight = embed.weight, without "
    "nn.Parameter(...). In place of a view, compute it in forward()."
)
"""What to do with memory that a parameter shares, as the end of an error message."""


class GradientReducer(Protocol):
    """Reduces each gradient to the worker that owns it (ShardedDataParallel); every
    worker gets those of its fragments only.
    """

    @property
    def consumed(self) -> bool:
        """Whether a step has used the gradients, and no backward pass came on this
        worker since.
        """

    def finish_reduction(self) -> None:
        """Reduce the gradients of this step's backward passes, if that has not
        happened.
        """

    def reopen(self) -> None:
        """Prepare for further backward passes, which add to the gradients that the
        optimizer did not clear.
        """

    def discard(self) -> None:
        """Forget gradients, reduced or not."""

    def consume(self) -> None:
        """Forget gradients that a step has used."""


class ReducerListener(Protocol):
    """Object that depends on whether gradients are sharded. OSS holds it weakly."""

    def renew(self) -> None:
        """A ShardedDataParallel was made over the optimizer."""


def _of_the_whole(name: str) -> property:
    """Return a property that is an attribute of the optimizer with the full groups."""
    return property(
        lambda self: getattr(self._full, name),
        lambda self, value: setattr(self._full, name, value),
    )


class OSS(Optimizer):
    """Optimizer state sharded over the workers of a process group.

    Under plain DDP, gradients are equal on all workers; a step then moves the
    parameters once more than DDP alone does (1.5 times the bytes of an all-reduce in
    total). Under :class:`ray_adascale.ShardedDataParallel` each worker gets the
    gradient of its share alone, and the traffic is that of one all-reduce.

    Every worker must call :meth:`step` together. The parameters become views of flat
    buffers, in which workers exchange them without copies. Parameters that are frozen
    from the beginning are not exchanged: a loop that changes one must change it alike
    on all workers. Before :meth:`state_dict`, all workers call
    :meth:`consolidate_state_dict`, after the last step.

    Args:
        params: Parameters or groups, as for any optimizer; the same on all workers.
        optim: Class of the optimizer to shard. Split by element for torch's elementwise
            optimizers and those given to :func:`ray_adascale.register_elementwise`, by
            whole parameters for all others.
        group: Process group; the default one if None. Without one, or alone in it, OSS
            is just the optimizer.
        broadcast_buffer_size: Elements in a bucket; zero and negative numbers for the
            default. FairScale ignores it.
        broadcast_fp16: Not supported: workers would hold rounded copies of the
            parameters.
        force_broadcast_object: Accepted for FairScale's sake; plain tensors are sent
            here.
        **defaults: The optimizer's hyperparameters.

    Raises:
        ValueError: An argument is out of its range, or a parameter can't lie in a
            bucket, or the optimizer is LBFGS or, on several workers, holds another one.
    """

    _BUCKET_NUMEL = 1 << 22

    refuses_chain = (
        "OSS can't be part of a chain: shard the chain instead, "
        "OSS.wrap(OptimizerChain([...]))."
    )
    """Error message of :class:`ray_adascale.OptimizerChain`, which does not import
    this class.
    """
    refuses_sharding = "The optimizer is sharded already."

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **defaults: Any,
    ) -> None:
        if not (isinstance(optim, type) and issubclass(optim, Optimizer)):
            raise TypeError(
                f"Invalid {optim=}. Must be an optimizer class, as in OSS(params, "
                "optim=torch.optim.SGD, lr=0.1); for an optimizer that is built "
                "already use OSS.wrap(optimizer)."
            )
        if broadcast_fp16:
            raise ValueError(
                "broadcast_fp16=True is not supported: workers would hold rounded "
                "copies of parameters."
            )
        self._split(
            optim(params, **defaults),
            group,
            broadcast_buffer_size if broadcast_buffer_size > 0 else -1,
        )

    @classmethod
    def wrap(
        cls,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_numel: int = -1,
    ) -> OSS:
        """Shard an optimizer that was built already. A scheduler built on it goes on to
        drive this one.

        The optimizer keeps the parameter groups, and loses the state of what other
        workers own.

        Raises:
            ValueError: It is sharded already, or LBFGS, or AdaScale:
                ``AdaScale(OSS(...))`` is the nesting, since the other way round each
                worker would have a gain of its own. Or this worker is not in the group.
        """
        self = cls.__new__(cls)
        self._split(optimizer, group, bucket_numel)
        return self

    def _split(
        self, optimizer: Optimizer, group: dist.ProcessGroup | None, bucket_numel: int
    ) -> None:
        self.group = group
        self.rank = 0
        self.world_size = 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = (
                dist.get_rank(group),
                dist.get_world_size(group),
            )
        check_optimizer(optimizer, self.world_size)
        if bucket_numel != -1 and bucket_numel < 1:
            raise ValueError(
                f"Invalid bucket size of {bucket_numel} elements. Must be positive, or "
                "-1, the default."
            )
        if self.rank < 0:
            raise ValueError(
                "This worker is not in the process group that OSS is to shard over."
            )
        self._full = optimizer  # with the full groups, which schedulers drive
        super().__setstate__({})
        self.buckets: list[Bucket] = []
        self.fragments: list[Fragment] = []
        """This worker's share, in parameter order."""
        self._bucket_numel = self._BUCKET_NUMEL if bucket_numel == -1 else bucket_numel
        self._owners = Owners(self.world_size)
        self.reducer: Callable[[], GradientReducer | None] = lambda: None
        """Returns what reduces gradients to their owners; None without a
        ShardedDataParallel, which owns it.
        """
        self.reducer_listeners: weakref.WeakSet[ReducerListener] = weakref.WeakSet()
        """Called when a ShardedDataParallel is made over this optimizer."""

        # The part that this worker updates.
        self._shard = _hooks.without_load_hooks(empty_copy(optimizer))
        given = dict(optimizer.state)
        optimizer.state = defaultdict(dict)
        self.state = {k: v for k, v in given.items() if not isinstance(k, Tensor)}
        self._shares.made = bool(given)
        self._distribute(0, given)
        for part in (optimizer, *(part for part, _ in parts_of(optimizer))):
            part._sharded = True  # type: ignore[attr-defined]
        self._pass_modes()

    def _pass_modes(self) -> None:
        """Let ``train()`` and ``eval()`` of the optimizer change this worker's
        share. Schedule-free optimizers have them.
        """
        for (part, _), (share, _) in zip(
            parts_of(self._full), parts_of(self._shard), strict=True
        ):
            for name in ("train", "eval"):
                if callable(method := getattr(share, name, None)):
                    for called in (part, self) if part is self._full else (part,):
                        setattr(
                            called, name, functools.partial(self._change_mode, method)
                        )

    def _change_mode(self, method: Callable[[], object]) -> None:
        """Call a method of the share's optimizer that changes weights, then exchange
        the shares. Collective.
        """
        self._bind()
        copy_hyperparameters(self.param_groups, self._shard.param_groups)
        method()
        copy_hyperparameters(self._shard.param_groups, self.param_groups)
        self._gather()

    def _distribute(self, first: int, given: Mapping[Any, Any] | None = None) -> None:
        """Put the parameters of the groups from number ``first`` on into buckets;
        keep this worker's part, also of a state.
        """
        numbers = range(first, len(self.param_groups))
        params: list[Tensor] = [
            p for g in numbers for p in self.param_groups[g]["params"]
        ]
        groups = [g for g in numbers for _ in self.param_groups[g]["params"]]
        for p in params:
            check_shardable(p)
        if self.world_size > 1:
            shared = shared_by_parameters(self._params())
            if shared is not None:
                raise ValueError(
                    f"Two parameters of the optimizer share memory, {shared[0]} and "
                    f"{shared[1]}. OSS would give each memory of its own, and they "
                    f"would train apart. {TIE}"
                )
        if self.world_size == 1:
            fragments = [
                Fragment(p, g, 0, p.numel(), p, 0)
                for p, g in zip(params, groups, strict=True)
            ]
        else:
            elementwise = {
                g: is_elementwise(type(part))
                for part, numbers in parts_of(self._full)
                for g in numbers
            }
            buckets = divide(
                params,
                groups,
                elementwise,
                self._owners,
                rank=self.rank,
                numel=self._bucket_numel,
            )
            self.buckets += buckets
            place = {p: i for i, p in enumerate(params)}
            fragments = sorted(
                (f for b in buckets for f in b.fragments), key=lambda f: place[f.param]
            )
        self.fragments += fragments
        for g in numbers:
            group = self.param_groups[g]
            mine = [f for f in fragments if f.group == g]
            # A group without a fragment stays: some optimizers keep scalars in their
            # groups, equal on all workers.
            local = {**group, "params": [f.tensor for f in mine]}
            if "param_names" in group:
                names = dict(zip(group["params"], group["param_names"], strict=True))
                local["param_names"] = [names[f.param] for f in mine]
            if isinstance(self._shard, OptimizerChain):
                self._shard.append_share(local, cast(OptimizerChain, self._full))
            else:
                self._shard.param_groups.append(local)
        self._known = KnownGroups(self.param_groups, "OSS")
        self._shares.numbers = self._numbers()
        self._shares.take(given or {}, fragments)

    # ---- interface of torch.optim.Optimizer ------------------------------------------

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this worker's share; its parameters are the
        :attr:`fragments`' tensors.
        """
        return self._shard

    param_groups: Any = _of_the_whole("param_groups")
    defaults: Any = _of_the_whole("defaults")

    @property
    def state(self) -> Any:
        """State of this worker's share only, by the :attr:`fragments`' tensors.

        ``state[param]`` of a user's parameter is its full state, while that is
        collected on this worker (:meth:`consolidate_state_dict`); else it raises
        RuntimeError. ``param in state`` and ``state.get(param)`` are of the share
        alone.
        """
        return self._shares

    @state.setter
    def state(self, value: Any) -> None:
        self._shard.state = self._full.state = ShareState(
            value, self._numbers(), made=True
        )

    def _numbers(self) -> dict[Tensor, int]:
        """Return the number, in a state dict, of each parameter that is not a
        fragment's tensor itself.
        """
        if self.world_size > 1:
            return {p: i for i, p in enumerate(self._params())}
        return {}

    @property
    def _shares(self) -> ShareState:
        # an optimizer's own load_state_dict() made another one
        if not isinstance(self._shard.state, ShareState):
            self.state = self._shard.state
        return cast(ShareState, self._shard.state)

    def __repr__(self) -> str:
        return f"OSS(rank={self.rank}, world_size={self.world_size}, {self._full!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._full.add_param_group(param_group)
        self._shares.collected = None
        self._distribute(len(self.param_groups) - 1)

    def refresh_trainable(self) -> None:
        """Do nothing: unlike in FairScale, freezing and unfreezing need no call. The
        split stays, so no state has to move.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._full.zero_grad(set_to_none=set_to_none)
        if (reducer := self.reducer()) is not None:
            reducer.discard()

    @_hooks.around_own_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this worker's share, then exchange the shares; return what the
        optimizer's step returns. Collective.

        Under ShardedDataParallel the step consumes the gradients: the next backward
        pass starts afresh, with or without ``zero_grad()``. The step that
        ``torch.distributed.checkpoint.state_dict`` takes to make an empty state
        exchanges nothing.

        Args:
            closure: Evaluates the model, calls ``backward()`` and returns the loss. It
                is passed to the optimizer, which may call it several times, equally
                often on every worker; each call sees the parameters as all workers have
                updated them by then. Under ShardedDataParallel each call reduces its
                gradients.
            **kwargs: Passed to the optimizer.

        Raises:
            RuntimeError: Under ShardedDataParallel, a pass in ``no_sync()`` came after
                the one that was reduced, and would be left out.
        """
        if closure is None and called_to_make_state(self):
            # Workers exchange nothing, and state_dict() works at once. The full state
            # stays on each until the next step or load.
            make_state(self._full, self._shares, self.fragments)
            return None
        self._known.check(self.param_groups)
        loss = None
        in_place = False

        def evaluate() -> Any:
            nonlocal loss, in_place
            if in_place:
                self._prepare_evaluation()
            with torch.enable_grad():
                loss = cast(Callable[[], Any], closure)()
            self._set_gradients(first=not in_place)
            in_place = True
            return loss

        # Torch's own optimizers begin with the closure. Others may begin with the
        # current gradients.
        if closure is None or type(self._shard) not in TORCHS:
            self._set_gradients(first=True)
            in_place = True
        # Torch's schedulers look for this. A scheduler that was built on the wrapped
        # optimizer patched a step() that is not called any more, and would warn that
        # the optimizer had not stepped before it.
        for part in (self._full, *(part for part, _ in parts_of(self._full))):
            part._opt_called = True  # type: ignore[attr-defined]
        try:
            if closure is None:
                result = self._shard.step(**kwargs)
            else:
                result = self._shard.step(evaluate, **kwargs)
        finally:
            if self.world_size > 1:
                for f in self.fragments:
                    f.tensor.grad = None
        # Some optimizers keep scalars of their own in the groups.
        copy_hyperparameters(self._shard.param_groups, self.param_groups)
        self._gather()
        if (reducer := self.reducer()) is not None:
            reducer.consume()
        self._shares.made = True
        self._shares.collected = None
        return loss if result is None else result

    def _bind(self) -> None:
        for bucket in self.buckets:
            bucket.bind()

    def _set_gradients(self, *, first: bool) -> None:
        """Set the gradients of this worker's share; the hyperparameters too, if this
        is the step's first time.
        """
        self._bind()
        if (reducer := self.reducer()) is not None:
            reducer.finish_reduction()
        elif self.world_size > 1:
            for f in self.fragments:
                f.tensor.grad = None if f.param.grad is None else f.of(f.param.grad)
        if first:
            copy_hyperparameters(self.param_groups, self._shard.param_groups)

    def _prepare_evaluation(self) -> None:
        """Before a further evaluation of the model within a step: gather parameters,
        and clear gradients that were cleared.
        """
        self._gather()
        if (reducer := self.reducer()) is not None:
            reducer.reopen()
        elif self.world_size > 1:
            # Every worker has the whole gradient, and only the owner's optimizer has
            # cleared its share of it.
            grads = [f.tensor.grad for f in self.fragments if f.tensor.grad is not None]
            params = self._params()
            kept = torch.tensor(
                float(any(bool(take_norm(g) != 0) for g in grads)),
                device=params[0].device,
            )
            dist.all_reduce(kept, op=dist.ReduceOp.MAX, group=self.group)
            if not kept:
                for p in params:
                    p.grad = None

    def _gather(self) -> None:
        """Gather the shares of the updated parameters from all workers."""
        if type(self._shard) not in TORCHS:
            for bucket in self.buckets:
                bucket.bring_back()
        # Optimizers step every parameter with a gradient, also if it was frozen since.
        moved = [
            b
            for b in self.buckets
            if any(p.requires_grad or p.grad is not None for p in b.params)
        ]
        if moved:
            gather_shards(
                [(bucket.flat, bucket.bounds) for bucket in moved], self.group
            )
            # As an update in place would: autograd then notices a backward pass through
            # weights that have changed.
            torch.autograd.graph.increment_version(
                [p for bucket in moved for p in bucket.params]
            )

    # ---- under ShardedDataParallel ---------------------------------------------------

    def attach_reducer(self, reducer: GradientReducer) -> None:
        """Let ``reducer`` set the gradient of each fragment from now on.

        Raises:
            ValueError: There is another one already.
        """
        if self.reducer() is not None:
            raise ValueError(
                "This OSS has a ShardedDataParallel already; make one OSS for each."
            )
        self.reducer = weakref.ref(reducer)
        for listener in list(self.reducer_listeners):
            listener.renew()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterable[Tensor]], Iterable[Tensor]] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Clip the whole gradient to a norm, as ``torch.nn.utils.clip_grad_norm_``
        would unsharded. Collective.

        If there are tensor- or pipeline-parallel workers beside this optimizer's, with
        an OSS of their own parameters, give
        ``process_group=torch.distributed.group.WORLD`` on all of them, as in FairScale,
        and a filter that counts a parameter with several copies on one worker only.
        Else each OSS clips its part of the model by itself.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm; ``inf`` for the largest element.
            filter_params_fn: Picks, from the parameters, those whose gradients count.
                All are clipped.
            process_group: The workers whose shares make up the model's gradient.
                Default: those of this optimizer.

        Returns:
            The norm before clipping, on the device.

        Raises:
            RuntimeError: Under ShardedDataParallel, no backward pass came since
                ``step()``, which has consumed the gradients.
        """
        params = self._params()
        counted = set(params if filter_params_fn is None else filter_params_fn(params))
        used = False
        if (reducer := self.reducer()) is not None:
            used = reducer.consumed
            reducer.finish_reduction()
        shared = reducer is not None and self.world_size > 1
        if process_group is None and not shared:
            grads = [
                cast(Tensor, p.grad)
                for p in with_dense_gradients(p for p in params if p in counted)
            ]
            total = torch.nn.utils.get_total_norm(grads, norm_type)
        else:
            device = params[0].device
            group = process_group or self.group
            wide = any(p.dtype in (torch.float64, torch.complex128) for p in params)
            # Other groups' workers may have parameters of other dtypes, so their norms
            # are sent as float64.
            dtype = torch.float64 if wide or group is not self.group else torch.float32
            grads = self._own_gradients(counted)
            total, unused = norm_over_workers(
                grads, not used, float(norm_type), group, device, dtype
            )
            total = total if wide else total.float()
            # a worker with gradients does not wait for the device
            used = used and not bool(unused)
        if used:
            raise RuntimeError(
                "clip_grad_norm() after step(): under ShardedDataParallel the step has "
                "consumed the gradients. Call it between backward() and step(); for "
                "the norm alone, clip_grad_norm(math.inf) there."
            )
        clipped = [f.tensor for f in self.fragments] if shared else params
        torch.nn.utils.clip_grads_with_norm_(
            with_dense_gradients(clipped), max_norm, total
        )
        return total

    def clip_grad_value(self, clip_value: float) -> None:
        """Clip each element of the whole gradient, as
        ``torch.nn.utils.clip_grad_value_`` would unsharded.

        Raises:
            RuntimeError: Under ShardedDataParallel, no backward pass came since
                ``step()``, which has consumed the gradients.
        """
        if (reducer := self.reducer()) is not None:
            if reducer.consumed:
                raise RuntimeError(
                    "clip_grad_value() after step(). Call it between backward() and "
                    "step()."
                )
            reducer.finish_reduction()
        shared = reducer is not None and self.world_size > 1
        clipped = [f.tensor for f in self.fragments] if shared else self._params()
        torch.nn.utils.clip_grad_value_(with_dense_gradients(clipped), clip_value)

    def _own_gradients(self, of: set[Tensor]) -> list[Tensor]:
        """Return this worker's shares of the gradients of some parameters."""
        mine = [f for f in self.fragments if f.param in of]
        if self.reducer() is None:
            return [
                stored_numbers(f.of(f.param.grad))
                for f in mine
                if f.param.grad is not None
            ]
        return [f.tensor.grad for f in mine if f.tensor.grad is not None]

    # ---- state -----------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the full state on one worker, for :meth:`state_dict` there.
        Collective.

        Peaks at one full copy there, and at one entry more than its share elsewhere.

        Args:
            recipient_rank: Rank in the process group; −1 for all of them.
        """
        shares = self._shares
        workers = (self.group, self.rank, self.world_size)
        shares.collected = None
        shares.collected = collect_state(
            shares, self._params(), self.fragments, *workers, recipient=recipient_rank
        )

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """Return the full state, equal to the unsharded optimizer's; independent of the
        number of workers.

        Args:
            all_ranks: First collect it on every worker; collective.

        Raises:
            RuntimeError: :meth:`consolidate_state_dict` was not called on this worker
                since the last step.
        """
        _hooks.before_save(self, self._full)
        if all_ranks or self.world_size == 1:
            self.consolidate_state_dict(EVERYONE)
        if self._shares.collected is None:
            raise RuntimeError(NOT_COLLECTED)
        # Dicts of its own, since torch.distributed.checkpoint.state_dict renames their
        # keys.
        collected = {
            k: dict(v) if isinstance(v, dict) else v
            for k, v in self._shares.collected.items()
        }
        # The present groups: a scheduler may have changed the LR since.
        return _hooks.after_save(
            {"state": collected, "param_groups": packed(self.param_groups)},
            self._full,
            self,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state on every worker; each keeps a copy of its share. The
        argument is left unchanged.

        Raises:
            ValueError: The groups differ in number or size.
        """
        state_dict = _hooks.before_load(state_dict, self, self._full)
        saved = state_dict["state"]
        saved_groups = state_dict["param_groups"]
        check_sizes(saved_groups, self.param_groups)
        where = dict(
            zip(
                self._params(),
                [i for group in saved_groups for i in group["params"]],
                strict=True,
            )
        )
        for group, other in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: copy_of(v) for k, v in other.items() if k != "params"})
        copy_hyperparameters(self.param_groups, self._shard.param_groups)
        made = bool(self.state) or bool(saved)
        # as the local optimizer numbers them
        in_order = sorted(self.fragments, key=lambda f: f.group)
        share = share_of(saved, where, in_order)
        self._shard.load_state_dict(
            {"state": share, "param_groups": packed(self._shard.param_groups)}
        )
        self.state = self._shard.state
        self._shares.made = made
        _hooks.after_load(self._full, self)

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "OSS belongs to a process group and can't be pickled or copied; use its "
            "state_dict()."
        )
