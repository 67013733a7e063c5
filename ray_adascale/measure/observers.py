"""Where squared norms are taken: of each gradient sample before reduction, and of the
reduced gradient.

An observer watches the parameters of an optimizer, group by group. It measures two
things: the squared norms of the gradient sample that the last backward pass produced on
this worker, and this worker's share of the squared norms of the reduced gradient (the
shares of all workers add up). Weights, loss scale and the sum over workers are the
caller's part.

Norms are taken in parameter order and summed in float64, whatever buckets gradients are
reduced in.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .._torch import without_gradients
from .autograd import (
    REENTRANT,
    accumulator_of,
    queue_end_of_backward,
    refuse_compiled,
    refuse_nested,
)
from .identity import Identity, project, total
from .norms import GroupSums, SampleNorms, take_norm, take_norms


class _RunningPass:
    """The running backward pass, as each parameter's hook sees it; it holds nothing
    alive.
    """

    __slots__ = ("end", "ignored", "measured", "number", "seen")

    def __init__(self) -> None:
        self.measured = True  # if not, no norms are taken
        self.ignored = False  # if so, hooks return at once
        self.number = 0
        self.seen: list[int] = []  # the last pass in which each hook ran
        # Autograd holds the callback of the end while the pass runs, and drops it where
        # an exception ends the pass.
        self.end: weakref.ref[Callable[[], None]] | None = None

    @property
    def runs(self) -> bool:
        return self.end is not None and self.end() is not None


class _Watched(NamedTuple):
    """A tensor whose gradients are watched, and what its node was made for: another
    tensor needs another node.
    """

    leaf: Tensor
    node: Any  # which torch holds weakly
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    layout: torch.layout


class PassListener(Protocol):
    """Receiver of the norms. The observer holds it weakly."""

    def on_begin(self, observer: GradientObserver) -> bool:
        """Begin a backward pass, at its first gradient; return whether it is the
        last pass of an optimizer step.
        """

    def on_local(self, observer: GradientObserver) -> None:
        """End the pass on this worker. Reduced gradients may still be on their way."""

    def on_reduced(self, observer: GradientObserver) -> None:
        """End the pass on all workers: reduced gradients are in place, if the pass
        reduced them.
        """

    def ensure_summed(self, caller: str) -> None:
        """Take part in the sums over workers that end a step, when this worker makes no
        further pass in it.

        Args:
            caller: Method that an error names.

        Raises:
            RuntimeError: Passes are missing, or there were too many.
        """


class Reducing(Protocol):
    """What reduces the gradients beside an observer that looks on, as
    DistributedDataParallel.
    """

    def in_one_round(self) -> bool:
        """Return whether all of a pass's collectives have been started when its last
        gradient is there, as far as is known.
        """

    def check_unused(self, unused: Sequence[Tensor]) -> None:
        """Raise if it waits for the gradients of these parameters, which got none in
        the pass that ends.
        """

    def check_cast(self, params: Sequence[Tensor]) -> None:
        """Raise if it does not follow parameters that were cast or moved."""


class GradientObserver(ABC):
    """Watches the gradients of groups of parameters, and calls its listener as
    backward passes begin and end.
    """

    sharded: bool = False
    """Whether each worker has its shards of the reduced gradient only. Else it has
    all of it, equal to the last bit.
    """

    measures: bool = True
    """Whether gradient samples are measured. If not, :meth:`reduced_sq_norms` alone
    is called.
    """

    _sums: GroupSums

    def __init__(self, listener: PassListener) -> None:
        self.listener: Callable[[], PassListener | None] = weakref.ref(listener)
        """Returns the object that is called as passes begin and end, while it is
        alive.
        """

    def refresh(self) -> None:  # noqa: B027 (most observers have nothing to do)
        """Watch parameters that were cast, moved or resized. Called between steps, and
        as a step begins.
        """

    def check_shapes(self) -> None:  # noqa: B027
        """Raise if a parameter was resized since :meth:`refresh`. Called as a pass
        begins, in which torch would raise.

        Raises:
            RuntimeError: A parameter was resized.
        """

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        """Return the gradients of earlier passes that the optimizer has not used or
        cleared yet. Called as a pass begins.
        """
        return (p.grad for p in params if p.grad is not None)

    @abstractmethod
    def local_sq_norms(self) -> Tensor:
        """Return ``‖g_i‖²`` per group of the gradient sample of the last backward pass,
        float64 ``[groups]``, and forget it.

        The norms are as measured: with the loss scale and the weight that the loss
        carried.
        """

    @abstractmethod
    def reduced_sq_norms(self) -> Tensor:
        """Return ``‖ḡ‖²`` per group, float64 ``[groups]``; where gradients are
        sharded, of this worker's shards.
        """

    def find_unseen(self) -> Sequence[Tensor]:
        """Return the parameters of this step whose gradients were not measured. All
        workers return the same.
        """
        return ()

    identity: Identity | None = None
    """Of the steps; None where the norms are those of the very gradients that are
    reduced.
    """

    def reduced_product(self) -> Tensor:
        """Return ⟨ḡ, v⟩ of the reduced gradient that this worker holds; float64,
        0-dim.
        """
        raise NotImplementedError  # called only where there is an `identity`

    def measure(self, measures: bool) -> None:
        """Measure gradient samples from the next pass on, or leave them out: hooks
        stay, and notice passes alone.
        """
        self.measures = measures

    def ignore(self, ignored: bool) -> None:  # noqa: B027
        """Let hooks return at once, where the caller knows all of a pass that is not
        measured.
        """

    @abstractmethod
    def detach(self) -> None:
        """Stop watching; remove every hook."""


class HookObserver(GradientObserver):
    """A hook on each parameter, frozen or not, which is always correct and needs no
    model. Hooks are set once.

    The hook is on the node that accumulates the gradient of one backward pass into
    ``.grad``. So it sees the gradient after the hooks of ``register_hook``, and before
    it is accumulated and before DDP reduces it. It takes the norm while the gradient is
    in the cache. The hooks hold no reference to the observer, so dropping the optimizer
    frees everything without :meth:`detach`.

    A subclass defines which tensors are hooked (:meth:`hook_all`, which calls
    :meth:`hook`) and where the reduced gradient is.

    Args:
        groups: Parameters of each parameter group.
        listener: Called as passes begin and end.
        local: Take the norm of each gradient sample. False if only the end of the pass
            matters.
        precondition: Maps (parameter, gradient) to the tensor that the norm is taken
            of.
        reducing: Reduces the gradients. Where it does so in one round, ``on_local`` is
            called before it has come to its end, which hides the time of what the
            listener sends.

    Attributes:
        last_pass: Whether the running pass is the last of an optimizer step.
    """

    identity: Identity

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        listener: PassListener,
        *,
        local: bool = True,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
        reducing: Reducing | None = None,
    ) -> None:
        super().__init__(listener)
        self.last_pass = True
        self._local = local
        self._reducing = reducing
        self._sent_early = False
        self.identity = Identity(
            exact=(lambda: True) if reducing is None else reducing.in_one_round
        )
        self._precondition = precondition
        self.groups = [list(params) for params in groups]
        self.hooked: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._hooks: dict[Tensor, Callable[[Sequence[Tensor | None]], None]] = {}
        self._watched: dict[Tensor, _Watched] = {}
        # in which the nodes of a GPU were made
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pass = _RunningPass()
        self._starting = threading.Lock()  # autograd has a thread for each GPU
        self.samples = SampleNorms(self.groups, self.device)
        self._sums = GroupSums(len(self.groups), self.device)
        self._group_of = {p: g for g, params in enumerate(self.groups) for p in params}
        self.hook_all()
        self.measure(self.measures)

    def measure(self, measures: bool) -> None:
        super().measure(measures)
        self._pass.measured = measures

    def ignore(self, ignored: bool) -> None:
        self._pass.ignored = ignored

    @without_gradients
    def reduced_product(self) -> Tensor:
        grads = [p.grad for params in self.groups for p in params if p.grad is not None]
        return total([project(grad) for grad in grads], self.device)

    def has_product(self, param: Tensor) -> bool:
        """Whether a parameter takes part in the identity. The answer as its hook is
        made holds.
        """
        return True

    def hook_all(self) -> None:
        """Hook all parameters that can have a gradient."""
        for params in self.groups:
            for param in params:
                if param.requires_grad or _can_train(param):
                    self.hook(param, param)

    def refresh(self) -> None:
        moved = self._moved()
        # torch makes another node only once nobody holds the old one
        for param, _ in moved:
            self.hooked.pop(param).remove()
            del self._watched[param]
        for param, leaf in moved:
            self.hook(param, leaf)

    def check_shapes(self) -> None:
        for leaf, _, _, _, shape, _ in self._watched.values():
            if leaf.shape != shape:
                raise RuntimeError(
                    f"A parameter of shape {tuple(shape)} was resized to "
                    f"{tuple(leaf.shape)} after optimizer.zero_grad(). Resize it "
                    "between optimizer.step() and optimizer.zero_grad(), which follows "
                    "it."
                )

    def find_unseen(self) -> list[Tensor]:
        """Return the parameters of another dtype, device, shape or layout than they
        were hooked with.
        """
        found = [
            p
            for p, (leaf, _, dtype, device, shape, layout) in self._watched.items()
            if leaf.dtype is not dtype
            or leaf.device != device
            or leaf.shape != shape
            or leaf.layout is not layout
        ]
        if found and self._reducing is not None:
            self._reducing.check_cast(found)
        return found

    def _moved(self) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter, accumulating tensor) where torch would make another node
        now than the hooked one.

        A node belongs to the stream in which it was made. In another one torch would
        wait for that stream in each pass.
        """
        streams = self._streams
        left = [
            device
            for device, stream in streams.items()
            if torch.accelerator.current_stream(device) != stream
        ]
        moved = self._watched if left else self.find_unseen()
        return [(param, self._watched[param].leaf) for param in moved]

    def slot(self, param: Tensor) -> Tensor | None:
        """Return the tensor for the norm of this parameter's gradients, if a hook
        may write it there without :meth:`taker`.
        """
        if self._local and self._precondition is None:
            return self.samples.slot(param)
        return None

    def taker(self, param: Tensor) -> Callable[[Tensor], object]:
        """Return a function that computes the norm of a gradient of this parameter
        and stores it in :attr:`samples`.
        """
        precondition = self._precondition
        samples = self.samples
        param_ref = weakref.ref(param)
        if not self._local:
            return lambda grad: None
        if precondition is None:
            return samples.taker(param)

        def take(grad: Tensor) -> None:
            held = cast(Tensor, param_ref())
            samples.put(held, take_norm(precondition(held, grad)))

        return take

    def hook(self, param: Tensor, leaf: Tensor) -> None:
        """Watch the gradients of ``leaf`` as those of ``param``."""
        if (hook := self._hooks.get(param)) is None:
            hook = self._hooks[param] = self._hook_of(param)
        node = accumulator_of(leaf)
        self._watched[param] = _Watched(
            leaf, node, leaf.dtype, leaf.device, leaf.shape, leaf.layout
        )
        self.identity.half |= leaf.dtype.itemsize < 4
        if not leaf.is_cpu:
            self._streams[leaf.device] = torch.accelerator.current_stream(leaf.device)
        self.hooked[param] = node.register_prehook(hook)

    def _hook_of(self, param: Tensor) -> Callable[[Sequence[Tensor | None]], None]:
        ref = weakref.ref(self)
        take = self.taker(param)
        current = self._pass
        slot = self.slot(param)
        dtype = None if slot is None else slot.dtype
        seen = current.seen
        index = len(current.seen)
        identity = self.identity
        has_product = self.has_product(param)
        seen.append(0)

        def hook(grads: Sequence[Tensor | None]) -> None:
            if current.ignored:
                return
            end = current.end
            if end is None or end() is None:
                observer = ref()
                if observer is None:
                    return
                observer.start_pass()
            if not current.measured:
                return
            (grad,) = grads
            if seen[index] == current.number:
                # of a parameter in two checkpointed parts
                raise RuntimeError(REENTRANT)
            seen[index] = current.number
            if grad is None:  # of an output that the loss does not use; a norm of zero
                return
            if grad.requires_grad:
                grad = grad.detach()
            if identity.products is not None and has_product:
                identity.products.append(project(grad))
            if grad.dtype is dtype and grad.layout is torch.strided and grad.is_cpu:
                torch.linalg.vector_norm(grad, out=slot)
            else:
                take(grad)

        return hook

    def start_pass(self) -> None:
        """Begin a pass, unless it has begun. Only to be called inside a hook."""
        if self._pass.runs:
            return
        refuse_compiled()
        refuse_nested()
        with self._starting:
            if not self._pass.runs:  # another thread's hook may have been quicker
                self._begin_pass()

    def _begin_pass(self) -> None:
        self._pass.number += 1
        if (listener := self.listener()) is not None:
            self.last_pass = listener.on_begin(self)
        self.samples.clear()
        ref = weakref.ref(self)

        def before_reduction() -> None:
            observer = ref()
            if observer is not None:
                observer._end_local()
                queue_end_of_backward(after_reduction)

        def after_reduction() -> None:
            observer = ref()
            if observer is not None:
                observer._end_reduced()

        # The hook of a parameter runs before DDP gets the gradient, so this callback is
        # queued before DDP's own wait for the reduction. A callback that is queued when
        # it runs comes after that wait.
        queue_end_of_backward(before_reduction)
        self._pass.end = weakref.ref(before_reduction)

    def _end_local(self) -> None:
        """End the pass on this worker: all of its gradients are there."""
        # DDP may write the reduced gradient into the same memory
        self.samples.flush()
        reducing = self._reducing
        if self.last_pass and self._pass.measured and reducing is not None:
            reducing.check_unused(self._unused())
        self._sent_early = reducing is None or reducing.in_one_round()
        if self._sent_early and (listener := self.listener()) is not None:
            listener.on_local(self)

    def _unused(self) -> list[Tensor]:
        """Return the parameters that got no gradient in this pass."""
        seen = self._pass.seen
        number = self._pass.number
        if seen.count(number) == len(seen):
            return []
        hooks = zip(self._hooks, seen, strict=True)
        return [p for p, last in hooks if last != number and p.requires_grad]

    def _end_reduced(self) -> None:
        """End the pass on all workers. In a step's last pass the gradients are reduced
        now.
        """
        self._pass.end = None
        if (listener := self.listener()) is None:
            return
        if not self._sent_early:
            listener.on_local(self)
        listener.on_reduced(self)

    @property
    def device(self) -> torch.device:
        return next(
            (p.device for params in self.groups for p in params), torch.device("cpu")
        )

    def local_sq_norms(self) -> Tensor:
        return self.samples.sums_of_squares()

    @without_gradients
    def reduced_sq_norms(self) -> Tensor:
        precondition = self._precondition
        with_grads = [
            (g, p, p.grad) for p, g in self._group_of.items() if p.grad is not None
        ]
        if precondition is None:
            norms = take_norms([grad for _, _, grad in with_grads])
        else:
            norms = [take_norm(precondition(p, grad)) for _, p, grad in with_grads]
        return self._sums(
            [(g, norm) for (g, _, _), norm in zip(with_grads, norms, strict=True)]
        )

    def detach(self) -> None:
        for handle in self.hooked.values():
            handle.remove()
        self.hooked.clear()
        self._watched.clear()


def _can_train(param: Tensor) -> bool:
    """Whether a frozen parameter may be unfrozen."""
    return (
        param.is_leaf
        and not param.is_inference()
        and (param.is_floating_point() or param.is_complex())
    )
