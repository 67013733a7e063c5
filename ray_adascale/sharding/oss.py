"""OSS: optimizer state sharded over workers. Each worker holds and updates its share, and sends the result to the others.

FairScale's name and constructor. Parameters lie in flat buckets (:mod:`ray_adascale.sharding.buckets`). An optimizer that
is known to treat every element by itself is split by element, so that every worker holds exactly 1/N; any other one is
split by whole parameters, which is right for every optimizer that treats each parameter by itself.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from .._torch import as_bytes, called_to_make_state, global_rank, is_dtensor
from ..measure.observers import GradientObserver, PassListener, take_norm
from .buckets import Bucket, Fragment, make_buckets
from .collectives import gather_shards
from .share_state import (
    NOT_COLLECTED,
    ShareState,
    copy_of,
    describe_entry,
    hyperparameters,
    packed,
    part_of_state,
    place_for,
)

__all__ = ["OSS", "GradientReducer", "has_state", "partition", "register_elementwise"]

_EVERYONE = -1

_TORCHS: frozenset[type[Optimizer]] = frozenset(
    {SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD}
)
_ELEMENTWISE: set[type[Optimizer]] = set(_TORCHS)


def register_elementwise(cls: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer class updates each element from that element's gradient and state alone.

    OSS then splits it by element. Wrong for LARS, LAMB, Muon, Shampoo and whatever looks at a norm, a row or a matrix.
    A subclass is not covered by its base class. Usable as a decorator.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise ValueError(f"Invalid {cls!r}. Must be a subclass of torch.optim.Optimizer.")
    _ELEMENTWISE.add(cls)
    return cls


def partition(sizes: list[int], parts: int, loads: list[int] | None = None) -> list[int]:
    """The part of each item so that the parts' sums are about equal: largest first, to the least loaded part.

    Args:
        sizes: Elements of each parameter.
        parts: Number of workers.
        loads: What each part holds already; updated in place.

    Returns:
        One part number per item; the same on every worker.
    """
    loads = [0] * parts if loads is None else loads
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(parts), key=lambda part: (loads[part], part))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


def has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps anything beside the parameters, so that sharding it saves memory."""
    return type(optimizer) is not SGD or any(group["momentum"] != 0 for group in optimizer.param_groups)


class GradientReducer(Protocol):
    """What leaves every worker with the gradient of its own fragments only (ShardedDataParallel)."""

    def finish_reduction(self) -> None:
        """Reduce what this step's backward passes left behind, if that has not happened."""

    def reopen(self) -> None:
        """Further backward passes come: what the optimizer left of the gradients it was handed is added to."""

    def discard(self, *, used_up: bool = False) -> None:
        """Forget gradients, reduced or not; ``used_up`` if a step has taken them."""

    def used_up(self) -> bool:
        """Whether a step has taken the gradients, and no backward pass came on this worker since."""

    def observe(self, optimizer: OSS, listener: PassListener, *, accumulating: bool) -> GradientObserver:
        """Take norms of the optimizer's gradients from now on; with ``accumulating``, a step has several passes."""


class OSS(Optimizer):
    """Optimizer state sharded over the workers of a process group.

    Under plain DDP, gradients are equal on all workers; a step then moves the parameters once more than DDP alone does
    (1.5 times the bytes of an all-reduce in total). Under :class:`ray_adascale.ShardedDataParallel` each worker gets the
    gradient of its share alone, and the traffic is that of one all-reduce.

    Every worker must call :meth:`step` together. The parameters become views of flat buffers, in which workers exchange
    them without copies. Parameters that are frozen from the beginning are not exchanged: a loop that changes one must change it
    alike on all workers. Before :meth:`state_dict`, all workers call :meth:`consolidate_state_dict`, after the last step.

    Args:
        params: Parameters or groups, as for any optimizer; the same on all workers.
        optim: Class of the optimizer to shard. Split by element for torch's elementwise optimizers and those given to
            :func:`register_elementwise`, by whole parameters for all others.
        group: Process group; the default one if None. Without one, or alone in it, OSS is just the optimizer.
        broadcast_buffer_size: Elements in a bucket; zero and negative numbers for the default. FairScale ignores it.
        broadcast_fp16: Not supported: workers would hold rounded copies of the parameters.
        force_broadcast_object: Accepted for FairScale's sake; plain tensors are sent here.
        **defaults: The optimizer's hyperparameters.

    Raises:
        ValueError: An argument is out of its range, or a parameter can't lie in a bucket, or the optimizer is LBFGS or, on
            several workers, holds another one.
    """

    _BUCKET_NUMEL = 1 << 22

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
                f"Invalid {optim=}. Must be an optimizer class, as in OSS(params, optim=torch.optim.SGD, lr=0.1); for an "
                "optimizer that is built already use OSS.wrap(optimizer)."
            )
        if broadcast_fp16:
            raise ValueError(
                "broadcast_fp16=True is not supported: workers would hold rounded copies of the parameters."
            )
        self._split(optim(params, **defaults), group, broadcast_buffer_size if broadcast_buffer_size > 0 else -1)

    @classmethod
    def wrap(cls, optimizer: Optimizer, group: dist.ProcessGroup | None = None, *, bucket_numel: int = -1) -> OSS:
        """Shard an optimizer that was built already. A scheduler built on it goes on to drive this one.

        The optimizer keeps the parameter groups, and loses the state of what other workers own.

        Raises:
            ValueError: It is sharded already, or LBFGS, or AdaScale: ``AdaScale(OSS(...))`` is the nesting, since the
                other way round each worker would have a gain of its own. Or this worker is not in the group.
        """
        self = cls.__new__(cls)
        self._split(optimizer, group, bucket_numel)
        return self

    def _split(self, optimizer: Optimizer, group: dist.ProcessGroup | None, bucket_numel: int) -> None:
        # AdaScale, which stands above this module, says on its class why it can't be sharded.
        refusal: str | None = getattr(type(optimizer), "refuses_sharding", None)
        if refusal is not None:
            raise ValueError(refusal)
        if isinstance(optimizer, OSS) or "_sharded" in vars(optimizer):
            # A second split would find the state of this worker's share only.
            raise ValueError("The optimizer is sharded already.")
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "OSS can't shard LBFGS: its direction is of all parameters together, not of each by itself."
            )
        initialized = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size(group) if initialized else 1
        held = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
        if held is not None and world_size > 1:
            name = type(optimizer).__name__
            raise ValueError(
                f"{name} holds another optimizer, in {held!r}, of which OSS would shard nothing. Shard that one, and wrap it, as "
                f"in {name}(OSS(...)); or use {name} without OSS."
            )
        if bucket_numel != -1 and bucket_numel < 1:
            raise ValueError(
                f"Invalid bucket size of {bucket_numel} elements. Must be positive, or -1 for the default."
            )
        self.group = group
        self.rank = dist.get_rank(group) if initialized else 0
        self.world_size = world_size
        if self.rank < 0:
            raise ValueError("This worker is not in the process group that OSS is to shard over.")
        self._full = optimizer  # keeps the full groups, which schedulers drive
        super().__setstate__({})
        self.splits_elements = type(optimizer) in _ELEMENTWISE
        """Whether the split is by element; else it is by whole parameters."""
        self.buckets: list[Bucket] = []
        self.fragments: list[Fragment] = []
        """This worker's share, in parameter order."""
        self._bucket_numel = self._BUCKET_NUMEL if bucket_numel == -1 else bucket_numel
        self._trainable_loads = [0] * self.world_size
        self._loads = [0] * self.world_size
        self._reducer: weakref.ref[GradientReducer] | None = None
        self._on_reducer: list[weakref.WeakMethod[Callable[[], None]]] = []

        # The part that this worker updates: the same object but for groups and state, so that any class works, whatever
        # its constructor asks for. A scheduler's patched `step` belongs to the original.
        self._shard: Optimizer = object.__new__(type(optimizer))
        self._shard.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
        self._shard.param_groups = []
        given, optimizer.state = optimizer.state, defaultdict(dict)
        self.state = {k: v for k, v in given.items() if not isinstance(k, Tensor)}
        self._shares.made = bool(given)
        self._distribute(0, given)
        optimizer._sharded = True  # type: ignore[attr-defined]

    def _distribute(self, first: int, given: Mapping[Any, Any] | None = None) -> None:
        """Put the parameters of the groups from ``first`` on into buckets, and give this worker its part of them.

        Args:
            first: Number of a parameter group.
            given: Full state of some of the parameters.
        """
        numbers = range(first, len(self.param_groups))
        params: list[Tensor] = [p for g in numbers for p in self.param_groups[g]["params"]]
        groups = [g for g in numbers for _ in self.param_groups[g]["params"]]
        for p in params:
            _check_shardable(p)
        if self.world_size == 1:
            fragments = [Fragment(p, g, 0, p.numel(), p, 0) for p, g in zip(params, groups, strict=True)]
        else:
            buckets = make_buckets(
                params,
                groups,
                None if self.splits_elements else self._owners(params),
                rank=self.rank,
                world_size=self.world_size,
                numel=self._bucket_numel,
            )
            self.buckets += buckets
            place = {p: i for i, p in enumerate(params)}
            fragments = sorted((f for b in buckets for f in b.fragments), key=lambda f: place[f.param])
        self.fragments += fragments
        for g in numbers:
            group = self.param_groups[g]
            mine = [f for f in fragments if f.group == g]
            # A group of which nothing is left stays: some optimizers keep scalars in their groups, equal on all workers.
            local = {**group, "params": [f.tensor for f in mine]}
            if "param_names" in group:
                names = dict(zip(group["params"], group["param_names"], strict=True))
                local["param_names"] = [names[f.param] for f in mine]
            self._shard.param_groups.append(local)
        self._shares.numbers = self._numbers()
        self._take_share(fragments, given or {})

    def _take_share(self, fragments: Iterable[Fragment], full: Mapping[Any, Any]) -> None:
        """Keep, of the full state of parameters, the part of each fragment."""
        for f in fragments:
            if f.param in full:
                self._shard.state[f.tensor] = part_of_state(full[f.param], f)

    def _owners(self, params: Sequence[Tensor]) -> list[int]:
        """The worker that owns each parameter, where parameters stay whole."""
        owners = [0] * len(params)
        # Frozen parameters have no state, so they must not weigh against those that have; they come second, and even
        # out what there is when they are thawed.
        trainable = [i for i, p in enumerate(params) if p.requires_grad]
        frozen = [i for i, p in enumerate(params) if not p.requires_grad]
        for i, owner in zip(
            trainable,
            partition([params[i].numel() for i in trainable], self.world_size, self._trainable_loads),
            strict=True,
        ):
            owners[i] = owner
            self._loads[owner] += params[i].numel()
        for i, owner in zip(
            frozen, partition([params[i].numel() for i in frozen], self.world_size, self._loads), strict=True
        ):
            owners[i] = owner
        return owners

    # ---- what a torch.optim.Optimizer has ------------------------------------------------------------------------

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this worker's share; its parameters are the :attr:`fragments`' tensors."""
        return self._shard

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._full.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._full.param_groups = value

    @property
    def state(self) -> Any:
        """State of this worker's share only, by the :attr:`fragments`' tensors.

        ``state[param]`` of a user's parameter is its full state, while that is collected on this worker
        (:meth:`consolidate_state_dict`); else it raises RuntimeError. ``param in state`` and ``state.get(param)`` are of the
        share alone.
        """
        return self._shares

    @state.setter
    def state(self, value: Any) -> None:
        self._shard.state = self._full.state = ShareState(value, self._numbers(), made=True)

    def _numbers(self) -> dict[Tensor, int]:
        """Return the number, in a state dict, of each parameter that is not a fragment's tensor itself."""
        return {p: i for i, p in enumerate(self._params())} if self.world_size > 1 else {}

    @property
    def _shares(self) -> ShareState:
        if not isinstance(self._shard.state, ShareState):  # an optimizer's own load_state_dict() made another one
            self.state = self._shard.state
        return cast(ShareState, self._shard.state)

    @property
    def defaults(self) -> dict[str, Any]:
        return self._full.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._full.defaults = value

    def __repr__(self) -> str:
        return f"OSS(rank={self.rank}, world_size={self.world_size}, {self._full!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._full.add_param_group(param_group)
        self._shares.collected = None
        self._distribute(len(self.param_groups) - 1)

    def refresh_trainable(self) -> None:
        """Does nothing: unlike in FairScale, freezing and unfreezing need no call. The split stays, so no state has to move."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._full.zero_grad(set_to_none=set_to_none)
        self.discard_gradients()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update this worker's share, then exchange the shares. Collective.

        Under ShardedDataParallel the gradients are used up: the next backward pass starts afresh, with or without
        ``zero_grad()``. The step that ``torch.distributed.checkpoint.state_dict`` takes to make an empty state exchanges nothing.

        Args:
            closure: Evaluates the model, calls ``backward()`` and returns the loss. It is handed on to the optimizer, which may
                evaluate it several times, on every worker as often: each time with what all have done to their parameters
                by then. Under ShardedDataParallel each evaluation reduces its gradients.
            **kwargs: Passed on to the optimizer.

        Returns:
            What the optimizer's step returns.

        Raises:
            RuntimeError: Under ShardedDataParallel, a pass in ``no_sync()`` came after the one that was reduced, and would be
                left out.
        """
        if closure is None and called_to_make_state(self):
            self._make_state()
            return None
        loss = None
        handed = False

        def evaluate() -> Any:
            nonlocal loss, handed
            if handed:
                self._take_back()
            with torch.enable_grad():
                loss = cast(Callable[[], Any], closure)()
            self._hand_over(first=not handed)
            handed = True
            return loss

        # Torch's own begin with the closure. Others may begin with the gradients in place.
        if closure is None or type(self._shard) not in _TORCHS:
            self._hand_over(first=True)
            handed = True
        # What torch's schedulers look for: one that was built on the wrapped optimizer patched a step() that nobody
        # calls any more, and would warn that the optimizer had not stepped before it.
        self._full._opt_called = True  # type: ignore[attr-defined]
        try:
            result = self._shard.step(**kwargs) if closure is None else self._shard.step(evaluate, **kwargs)
        finally:
            if self.world_size > 1:
                for f in self.fragments:
                    f.tensor.grad = None
        for local, group in zip(self._shard.param_groups, self.param_groups, strict=True):
            group.update(hyperparameters(local))  # some optimizers keep scalars of their own in the groups
        self._gather()
        if self.reducer is not None:
            self.reducer.discard(used_up=True)
        self._shares.made, self._shares.collected = True, None
        return loss if result is None else result

    def _make_state(self) -> None:
        """Make the state of an optimizer that has none, as a step with learning rates and gradients of zero makes it.

        Each worker makes the full state, keeps it as collected, and cuts its share from it. Workers exchange nothing, and
        state_dict() works at once. The full state stays on every worker until the next step or load.
        """
        source, shares = self._full, self._shares
        source.state = defaultdict(dict)
        try:
            type(source).step(source)
            made = source.state
        finally:
            source.state = shares
        shares.update({k: v for k, v in made.items() if not isinstance(k, Tensor)})
        self._take_share(self.fragments, made)
        place = {p: i for i, p in enumerate(self._params())}
        shares.collected = {place[k] if isinstance(k, Tensor) else k: copy_of(v) for k, v in made.items()}
        shares.made = True

    def _hand_over(self, *, first: bool) -> None:
        """Give the optimizer the gradients of its share; the hyperparameters too, if this is the step's first time."""
        for bucket in self.buckets:
            if not bucket.bound():
                bucket.bind()
        reducer = self.reducer
        if reducer is not None:
            reducer.finish_reduction()
        elif self.world_size > 1:
            for f in self.fragments:
                f.tensor.grad = None if f.param.grad is None else f.of(f.param.grad)
        if first:
            for local, group in zip(self._shard.param_groups, self.param_groups, strict=True):
                local.update(hyperparameters(group))

    def _take_back(self) -> None:
        """Before the model is evaluated within a step: parameters as all optimizers have left them, and the gradients too."""
        self._gather()
        reducer = self.reducer
        if reducer is not None:
            reducer.reopen()
        elif self.world_size > 1:
            # Every worker has the whole gradient, and only the owner's optimizer has cleared its share of it.
            grads = [f.tensor.grad for f in self.fragments if f.tensor.grad is not None]
            params = self._params()
            kept = torch.tensor(float(any(bool(take_norm(g) != 0) for g in grads)), device=params[0].device)
            dist.all_reduce(kept, op=dist.ReduceOp.MAX, group=self.group)
            if not kept:
                for p in params:
                    p.grad = None

    def _gather(self) -> None:
        """Get everybody's share of the updated parameters."""
        if type(self._shard) not in _TORCHS:
            for bucket in self.buckets:
                bucket.bring_back()
        # Optimizers go by the gradient: one that was left behind when the parameter was frozen still counts.
        moved = [b for b in self.buckets if any(p.requires_grad or p.grad is not None for p in b.params)]
        if moved:
            gather_shards([(bucket.flat, bucket.bounds) for bucket in moved], self.group)
            # As an update in place would: autograd then notices a backward pass through weights that have changed.
            torch.autograd.graph.increment_version([p for bucket in moved for p in bucket.params])

    # ---- under ShardedDataParallel -------------------------------------------------------------------------------

    @property
    def reducer(self) -> GradientReducer | None:
        """The ShardedDataParallel that reduces gradients to their owners, or None."""
        return None if self._reducer is None else self._reducer()

    def attach_reducer(self, reducer: GradientReducer) -> None:
        """From now on the gradient of each fragment is put into its tensor by ``reducer``.

        Raises:
            ValueError: There is another one already.
        """
        if self.reducer is not None:
            raise ValueError("This OSS has a ShardedDataParallel already; make one OSS for each.")
        self._reducer = weakref.ref(reducer)
        for method in self._on_reducer:
            call = method()
            if call is not None:
                call()

    def when_reducer_attached(self, method: Callable[[], None]) -> None:
        """Call a bound method, held weakly, when a ShardedDataParallel is made over this optimizer."""
        self._on_reducer.append(weakref.WeakMethod(method))

    def step_gradients(self) -> list[Tensor]:
        """The gradients that :meth:`step` will use on this worker: its share of them under ShardedDataParallel."""
        if self.reducer is None or self.world_size == 1:
            return [p.grad for p in self._params() if p.grad is not None]
        self.reducer.finish_reduction()
        return [f.tensor.grad for f in self.fragments if f.tensor.grad is not None]

    def discard_gradients(self) -> None:
        """Forget the sharded gradients, if there are any."""
        reducer = self.reducer
        if reducer is not None:
            reducer.discard()

    @torch.no_grad()
    def clip_grad_norm(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        filter_params_fn: Callable[[Iterable[Tensor]], Iterable[Tensor]] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Clip the whole gradient to a norm, as ``torch.nn.utils.clip_grad_norm_`` would unsharded. Collective.

        With tensor- or pipeline-parallel workers beside this optimizer's, each of which has an OSS of its own parameters, give
        ``process_group=torch.distributed.group.WORLD`` on all of them, as FairScale takes it, and a filter that counts a
        parameter of which several have a copy on one of them. Else each would clip its part of the model by itself.

        Args:
            max_norm: Largest norm.
            norm_type: p of the p-norm; ``inf`` for the largest element.
            filter_params_fn: Picks, from the parameters, those whose gradients count. All are clipped.
            process_group: The workers whose shares make up the model's gradient. Default: those of this optimizer.

        Returns:
            The norm before clipping, on the device.

        Raises:
            RuntimeError: Under ShardedDataParallel, no backward pass came since ``step()``, which has used the gradients up.
        """
        params = self._params()
        counted = set(params if filter_params_fn is None else filter_params_fn(params))
        shared = self.reducer is not None and self.world_size > 1
        used = False
        if self.reducer is not None:
            used = self.reducer.used_up()
            self.reducer.finish_reduction()
        clipped = [f.tensor for f in self.fragments] if shared else params
        if process_group is None and not shared:
            grads = [p.grad for p in params if p.grad is not None and p in counted]
            total = torch.nn.utils.get_total_norm(grads, norm_type)
            all_used = used
        else:
            grads = self._own_gradients(counted)
            total, unused = self._norm_over(process_group or self.group, grads, float(norm_type), not used)
            all_used = used and not bool(unused)  # a worker with gradients does not wait for the device
        if all_used:
            raise RuntimeError(
                "clip_grad_norm() after step(): under ShardedDataParallel the step has used the gradients up. Call it between "
                "backward() and step(); for the norm alone, clip_grad_norm(math.inf) there."
            )
        torch.nn.utils.clip_grads_with_norm_(clipped, max_norm, total)
        return total

    def _own_gradients(self, of: set[Tensor]) -> list[Tensor]:
        """This worker's shares of the gradients of some parameters."""
        if self.reducer is not None or self.world_size == 1:
            return [f.tensor.grad for f in self.fragments if f.param in of and f.tensor.grad is not None]
        return [f.of(f.param.grad) for f in self.fragments if f.param in of and f.param.grad is not None]

    def _norm_over(
        self, group: dist.ProcessGroup | None, grads: list[Tensor], norm_type: float, flag: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of the gradients that all workers of a group have together, and whether any has raised the flag."""
        params = self._params()
        total = torch.nn.utils.get_total_norm(grads, norm_type)
        # The same dtype on all workers, whatever lies on each.
        wide = any(p.dtype in (torch.float64, torch.complex128) for p in params)
        total = total.to(params[0].device, torch.float64 if wide or group is not self.group else torch.float32)
        largest = norm_type == float("inf")
        both = torch.stack([total if largest else total**norm_type, torch.full_like(total, float(flag))])
        dist.all_reduce(both, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        total, raised = both.unbind()
        if not largest:
            total = total ** (1 / norm_type)
        return total if wide else total.float(), raised

    # ---- state ---------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the full state on one worker, for :meth:`state_dict` there. Collective.

        Peaks at one full copy there, and at one entry more than its share elsewhere.

        Args:
            recipient_rank: Rank in the process group; −1 for all of them.
        """
        if not _EVERYONE <= recipient_rank < self.world_size:
            raise ValueError(
                f"Invalid {recipient_rank=}. Must be one of the {self.world_size} ranks in the process group, or -1 for all."
            )
        self._shares.collected = None
        params = self._params()
        place = {p: i for i, p in enumerate(params)}
        mine = [
            [
                place[f.param],
                f.start,
                f.numel,
                [[name, *describe_entry(value, f)] for name, value in self.state[f.tensor].items()],
            ]
            for f in self.fragments
            if f.tensor in self.state
        ]
        receives = recipient_rank in (self.rank, _EVERYONE)
        states: dict[Any, Any] = {}
        held = {place[f.param]: f for f in self.fragments}
        sent: set[tuple[int, Any]] = set()
        for owner, entries in enumerate(self._all_gather_object(mine)):
            for i, start, numel, entry in entries:
                for name, kind, payload in entry:
                    if kind != "part" and (i, name) in sent:
                        continue  # another owner's copy of a scalar, such as Adam's step
                    sent.add((i, name))
                    fragment = held[i] if owner == self.rank else None
                    source = None if fragment is None or kind == "value" else self.state[fragment.tensor][name].detach()
                    state = states.setdefault(i, {})
                    if kind == "value":
                        state[name] = payload
                    else:
                        into = place_for(state, name, kind, payload, params[i], start, numel) if receives else None
                        self._move(owner, recipient_rank, source, into, payload)
        if receives:
            states.update({k: copy_of(v) for k, v in self.state.items() if not isinstance(k, Tensor)})
            self._shares.collected = states

    def _move(self, owner: int, recipient: int, source: Tensor | None, into: Tensor | None, payload: list[Any]) -> None:
        """Bring one tensor, or part of it, from its owner to the recipient."""
        if owner == recipient or self.world_size == 1:
            if source is not None and into is not None:
                into.copy_(source)
            return
        if source is None and into is None:
            return
        shape, dtype = payload[0], getattr(torch, payload[1])
        device = self._carrier_device()
        if source is None:
            carrier = torch.empty(shape, dtype=dtype, device=device)
        else:
            carrier = source.to(device).contiguous()
        if carrier.numel():
            data = as_bytes(carrier.view(-1))
            if recipient == _EVERYONE:
                dist.broadcast(data, global_rank(self.group, owner), group=self.group)
            elif source is not None:
                dist.send(data, global_rank(self.group, recipient), group=self.group)
            else:
                dist.recv(data, global_rank(self.group, owner), group=self.group)
        if into is not None:
            into.copy_(carrier)

    def _carrier_device(self) -> torch.device:
        """Where tensors must be for this group to move them."""
        if "nccl" in dist.get_backend_config(self.group) and "gloo" not in dist.get_backend_config(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _all_gather_object(self, mine: Any) -> list[Any]:
        """Each worker's object, in rank order. It is pickled: the workers of a group run one program and trust each other."""
        if self.world_size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The full state, as the unsharded optimizer would give it; independent of the number of workers.

        Args:
            all_ranks: First collect it on every worker; collective.

        Raises:
            RuntimeError: :meth:`consolidate_state_dict` was not called on this worker since the last step.
        """
        if all_ranks or self.world_size == 1:
            self.consolidate_state_dict(_EVERYONE)
        collected = self._shares.collected
        if collected is None:
            raise RuntimeError(NOT_COLLECTED)
        # Dicts of its own, since torch.distributed.checkpoint.state_dict renames their keys.
        collected = {k: dict(v) if isinstance(v, dict) else v for k, v in collected.items()}
        # The groups as they are now: a scheduler may have moved the LR since.
        return {"state": collected, "param_groups": packed(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state on every worker; each keeps a copy of its share. The argument is left as it is.

        Raises:
            ValueError: The groups differ in number or size.
        """
        saved_groups = state_dict["param_groups"]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"The state dict has parameter groups of {saved_sizes} parameters, the optimizer of {sizes} parameters."
            )
        saved = state_dict["state"]
        where = dict(zip(self._params(), [i for group in saved_groups for i in group["params"]], strict=True))
        for group, other in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: copy_of(v) for k, v in other.items() if k != "params"})
        for local, group in zip(self._shard.param_groups, self.param_groups, strict=True):
            local.update(hyperparameters(group))
        # As the local optimizer numbers them.
        fragments = [f for g in range(len(sizes)) for f in self.fragments if f.group == g]
        state: dict[Any, Any] = {
            i: part_of_state(copy_of(saved[where[f.param]]), f)
            for i, f in enumerate(fragments)
            if where[f.param] in saved
        }
        numbers = set(where.values())
        state.update({k: copy_of(v) for k, v in saved.items() if k not in numbers})
        made = bool(self.state) or bool(saved)
        self._shard.load_state_dict({"state": state, "param_groups": packed(self._shard.param_groups)})
        self.state = self._shard.state
        self._shares.made = made

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OSS belongs to a process group and can't be pickled or copied; use its state_dict().")


def _check_shardable(p: Tensor) -> None:
    if isinstance(p, torch.nn.parameter.UninitializedParameter):
        raise ValueError("A lazy module's parameter has no shape yet. Run one forward pass before OSS is made.")
    if is_dtensor(p):
        raise ValueError(
            "The parameters are sharded already (DTensor, as from fully_shard): use the optimizer without OSS."
        )
    if p.layout is not torch.strided:
        raise ValueError(f"Invalid parameter of layout {p.layout}. OSS shards dense parameters only.")
