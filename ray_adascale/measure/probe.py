"""The noise of one batch's gradient, measured in an extra pass without an effect on training: by its halves, or by its examples.

A search runs at the base batch on one worker: one gradient sample per step, so the variance cannot be read off the step
itself. :func:`probe_noise` makes one extra pass over the batch, cut in two: with ``w_i = m_i/m`` and the halves' mean gradients
``g_1, g_2``, :func:`ray_adascale.gain.gradient_moments` gives unbiased σ² and μ² (n = 2). :func:`probe_examples` has the m
examples of the batch as gradient samples (n = m), where per-example norms are available.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from ..gain import gradient_moments
from .norms import take_norm
from .per_example import ExampleNorms, MeasuredPasses


def probe_noise(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    scale: float = 1.0,
    parameters: Sequence[nn.Parameter] | None = None,
) -> tuple[float, float] | None:
    """Return unbiased σ² and μ² at the model's present weights, from one batch cut into two halves.

    Gradients, buffers (batch-norm statistics), module attributes, train/eval mode and the random number generators (torch on
    the CPU and on the model's and batch's CUDA devices, Python, NumPy's global one) are restored, also if ``loss_fn`` raises.
    Hooks on the parameters don't fire; module hooks do, since ``loss_fn`` calls the model itself. Two things can't be restored:
    weights that ``loss_fn`` writes to, and objects that an attribute refers to (the items of a list).

    Memory: one set of gradients beside the training's own. Time: one forward and backward pass over the batch, and one
    host synchronization.

    Args:
        model: The bare model: not wrapped by DDP, not compiled.
        loss_fn: ``loss_fn(model, batch)`` is the *mean* loss over the batch's examples, a scalar. Called twice, with
            about half of the examples each time. A module that needs two examples (BatchNorm1d) needs a batch of four.
        batch: Tensors and NumPy arrays with the same leading dimension m, in nested lists, tuples, named tuples and
            mappings. They are cut, as are lists of m strings; any other leaf goes to both halves.
        scale: S, the batch's size over the base batch's. σ² is that of one *base* batch, whatever was probed.
        parameters: Parameters to measure the gradient of. Default: all trainable ones of the model.

    Returns:
        ``(σ², μ²)``, of the loss as ``loss_fn`` returns it (not multiplied by a loss scale), unclipped and unsmoothed:
        μ² may be negative, and both are infinite or NaN where the gradient is. None if the batch can't be cut: nothing
        in it has a leading dimension, the leading dimensions differ, or m < 2.

    Raises:
        ValueError: The model is wrapped, a parameter is not in the model, nothing is trainable, the loss is not a
            scalar or depends on no parameter.
        RuntimeError: After a pass the model holds another parameter object than before. An optimizer would go on to update
            the old one.
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError("Invalid model: wrapped in DistributedDataParallel. Probe the bare one, model.module.")
    measured = _measured(model, parameters)
    halves = halves_of(batch)
    if halves is None:
        return None
    (half1, m1), (half2, m2) = halves
    w1, w2 = m1 / (m1 + m2), m2 / (m1 + m2)

    tensors = [*model.parameters(), *model.buffers(), *(x for x in _leaves(batch) if isinstance(x, Tensor))]
    gradients: dict[Tensor, Tensor] = {}  # of the first half, until the second half's comes
    norms: dict[Tensor, list[Tensor]] = {}  # parameter -> ‖g1‖², ‖g2‖², ‖g1 − g2‖²

    def compare(parameter: Tensor, g2: Tensor) -> None:
        g1 = gradients.pop(parameter, None)
        zero = torch.zeros((), dtype=torch.float64, device=g2.device)
        norms[parameter] = (
            [zero, _sq_norm(g2), _sq_norm(g2)] if g1 is None else [_sq_norm(g1), _sq_norm(g2), _sq_distance(g1, g2)]
        )

    with _generators_kept(tensors):
        _gradients(model, loss_fn, half1, measured, gradients.__setitem__)
        _gradients(model, loss_fn, half2, measured, compare)
    for parameter, g1 in gradients.items():  # parameters that only the first half used
        norms[parameter] = [_sq_norm(g1), torch.zeros_like(_sq_norm(g1)), _sq_norm(g1)]

    # In parameter order, not in the order in which the gradients came.
    rows = [norms[parameter] for parameter in measured if parameter in norms]
    home = rows[0][0].device
    n1, n2, difference = torch.stack([torch.stack(row).to(home) for row in rows]).cpu().sum(0)
    # A − C = w1·w2·‖g1 − g2‖²: the same number without the cancellation.
    a = w1 * n1 + w2 * n2
    sigma2, mu2 = gradient_moments(a, a - w1 * w2 * difference, scale=scale, count=2)
    return sigma2.item(), mu2.item()


def probe_examples(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    parameters: Sequence[nn.Parameter] | None = None,
) -> tuple[float, float] | str:
    """Return unbiased σ² and μ² of one base batch at the model's present weights, with its examples as gradient samples.

    What is restored, and the cost, are those of :func:`probe_noise`.

    Args:
        model: The bare model: not wrapped by DDP, not compiled.
        loss_fn: ``loss_fn(model, batch)`` is the *mean* loss over the batch's examples, a scalar. Called once.
        batch: The base batch. Its examples are in the first dimension of each layer's input.
        parameters: Parameters to measure the gradient of. Default: all trainable ones of the model.

    Returns:
        ``(σ², μ²)``; or a phrase that says why the pass can't be measured.

    Raises:
        ValueError: As for :func:`probe_noise`; or per-example norms are not available for a parameter, which
            :func:`ray_adascale.measure.per_example.not_covered` names.
    """
    measured = _measured(model, parameters)
    norms = ExampleNorms(model, [measured])
    found: list[MeasuredPasses] = []
    reduced: dict[Tensor, Tensor] = {}

    @contextmanager
    def watched() -> Iterator[None]:
        norms.begin()  # within the pass, where the layers have the parameters that it differentiates by
        try:
            yield
            found.append(norms.end())
        finally:
            norms.cancel()

    def receive(parameter: Tensor, gradient: Tensor) -> None:
        reduced[parameter] = _sq_norm(gradient)

    tensors = [*model.parameters(), *model.buffers(), *(x for x in _leaves(batch) if isinstance(x, Tensor))]
    with _generators_kept(tensors):
        _gradients(model, loss_fn, batch, measured, receive, watched())
    (passes,) = found
    if passes.problem is not None:
        return passes.problem
    if passes.examples < 2:
        return "a batch of one example"
    mean = passes.sq_norms.sum().cpu() * passes.examples
    c = torch.stack([reduced[parameter].cpu() for parameter in measured if parameter in reduced]).sum()
    sigma2, mu2 = gradient_moments(mean, c, scale=1.0, count=passes.examples)
    return sigma2.item(), mu2.item()


def examples_of(batch: Any, count: int) -> tuple[Any, int] | None:
    """Return the first examples of a batch, and their number; None if the batch can't be cut.

    Args:
        batch: As for :func:`probe_noise`.
        count: Most examples to return.
    """
    sizes = list(_leading_dimensions(batch))
    if not sizes or min(sizes) != max(sizes) or sizes[0] < 1:
        return None
    count = min(count, sizes[0])
    return _part(batch, sizes[0], slice(0, count)), count


def halves_of(batch: Any) -> tuple[tuple[Any, int], tuple[Any, int]] | None:
    """Return the two halves of a batch, each with its number of examples; None if the batch can't be cut.

    Args:
        batch: As for :func:`probe_noise`.
    """
    sizes = list(_leading_dimensions(batch))
    if not sizes or min(sizes) != max(sizes) or sizes[0] < 2:
        return None
    m = sizes[0]
    cut = (m + 1) // 2
    return (_part(batch, m, slice(0, cut)), cut), (_part(batch, m, slice(cut, m)), m - cut)


def _measured(model: nn.Module, parameters: Sequence[nn.Parameter] | None) -> list[Tensor]:
    """Return the trainable parameters to measure, in the model's order; a shared parameter once."""
    held = list(dict.fromkeys(_held(model, nn.Module.named_parameters).values()))
    wanted = {id(p) for p in (model.parameters() if parameters is None else parameters)}
    if parameters is not None:
        known = {id(p) for p in held}
        for i, p in enumerate(parameters):
            if id(p) not in known:
                raise ValueError(f"Invalid parameters[{i}] of shape {tuple(p.shape)}: not a parameter of the model.")
    trainable = [p for p in held if p.requires_grad and id(p) in wanted]
    if not trainable:
        raise ValueError("Invalid parameters: none is trainable, so there is no gradient to probe.")
    return trainable


def _held(module: nn.Module, members: Callable[..., Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the parameters or buffers of a module and its parts, one entry for each attribute that holds one.

    A part that is registered under two names is listed under the first. A tensor that is shared by two attributes is
    listed twice.

    Args:
        module: A module.
        members: ``nn.Module.named_parameters`` or ``nn.Module.named_buffers``; a module's own may leave some out.
    """
    held: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        held.update(members(part, prefix, recurse=False, remove_duplicate=False))
    return held


class _Pass(nn.Module):
    """One forward and backward pass as a module, so that ``functional_call`` can give it other parameters.

    The backward pass is inside as well: activation checkpointing runs the model again there.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        watched: AbstractContextManager[object],
    ) -> None:
        super().__init__()
        self.watched = watched
        self.model = model
        self.loss_fn = loss_fn
        self.inputs: list[Tensor] = []  # the aliases to differentiate by

    def forward(self, batch: Any) -> None:
        with self.watched:
            self._run(batch)

    def _run(self, batch: Any) -> None:
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"Invalid loss: {found}. loss_fn(model, batch) must return a scalar tensor, the mean loss."
            )
        if not loss.requires_grad:
            raise ValueError("Invalid loss: it depends on no parameter. Don't detach it or turn gradients off.")
        loss.backward(inputs=self.inputs)


def _gradients(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    measured: Sequence[Tensor],
    receive: Callable[[Tensor, Tensor], None],
    watched: AbstractContextManager[object] | None = None,
) -> None:
    """Call ``receive(parameter, gradient)`` for every measured parameter that the loss depends on.

    ``autograd.grad`` on the parameters would fire the hooks registered on them, AdaScale's among them. So the pass runs
    on aliases of the parameters: the same storage, other autograd leaves. Each alias passes on its gradient as soon as
    that is complete and drops it, which ``autograd.grad`` could not do. Buffers are replaced by copies: values that the pass
    writes are lost, and the originals aren't written to. Their version counters don't move, so a graph that is still to be
    differentiated stays valid.

    ``functional_call`` swaps by name, and restores in the order in which it swapped. If one attribute is swapped under
    two names, the second swap finds the alias, and the restore ends with it. So each attribute is swapped under one name,
    and ``tie_weights=False`` keeps torch from adding the others. A loss that is a module may hold the model, or parameters of
    the model, as well.
    """
    call = _Pass(model, loss_fn, nullcontext() if watched is None else watched)
    parameters, buffers = _held(call, nn.Module.named_parameters), _held(call, nn.Module.named_buffers)
    lent_parameters = dict.fromkeys(_held(model, nn.Module.named_parameters).values())  # not the loss's own
    wanted = set(measured)
    aliases: dict[Tensor, Tensor] = {p: p.detach().requires_grad_(p in wanted) for p in lent_parameters}

    def hook(parameter: Tensor) -> Callable[[Tensor], None]:
        def pass_on(alias: Tensor) -> None:
            assert alias.grad is not None
            gradient, alias.grad = alias.grad, None
            receive(parameter, gradient)

        return pass_on

    for parameter in measured:
        aliases[parameter].register_post_accumulate_grad_hook(hook(parameter))
    call.inputs = [aliases[parameter] for parameter in measured]
    for buffer in buffers.values():
        if buffer not in aliases:  # a parameter may be registered as a buffer too
            aliases[buffer] = buffer.detach().clone()
    held = parameters | buffers
    lent = {name: aliases[tensor] for name, tensor in held.items() if tensor in aliases}
    with _attributes_kept(call), torch.enable_grad():
        functional_call(call, lent, (batch,), tie_weights=False)
    now = _held(call, nn.Module.named_parameters)
    changed = [name.removeprefix("model.") for name, p in parameters.items() if now.get(name) is not p]
    if changed:
        raise RuntimeError(
            f"The noise probe found {changed[0]!r} to be another parameter after the loss was computed than before"
            f"{f', and {len(changed) - 1} more' if len(changed) > 1 else ''}. The optimizer would not update what the model now "
            "uses. Don't replace parameters in loss_fn or forward(); set up the model before training begins."
        )


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes and the buffers of a module and its parts on exit.

    A forward pass may switch modes, count its calls, or fill and register buffers when it first runs. Training must not see
    values from half a batch.
    """
    # nn.Module has no public list of its buffers that names those that are None.
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)


@contextmanager
def _generators_kept(tensors: list[Tensor]) -> Iterator[None]:
    """Restore the random number generators on exit."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002 - the user's augmentation may well use the global generator
    cuda = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _sq_norm(x: Tensor) -> Tensor:
    """Return ‖x‖² as a float64 scalar."""
    return take_norm(x).double().square()


def _sq_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return ‖x − y‖², and overwrite x. Half-precision gradients are subtracted in float32."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if x.layout != y.layout:
        x, y = x.to_dense(), y.to_dense()
    return _sq_norm(x.sub_(y))


def _is_array(x: Any) -> bool:
    return isinstance(x, Tensor | np.ndarray)


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for x in batch.values():
            yield from _leaves(x)
    elif isinstance(batch, tuple | list) and not isinstance(batch, PackedSequence):
        for x in batch:
            yield from _leaves(x)
    else:
        yield batch


def _leading_dimensions(batch: Any) -> Iterator[int]:
    """Yield m of every array; 0, which can't be cut, if its examples lie along another dimension than the first."""
    for x in _leaves(batch):
        if isinstance(x, PackedSequence) or (isinstance(x, Tensor) and x.is_nested):
            yield 0
        elif _is_array(x) and x.ndim > 0:
            yield x.shape[0]


def _part(batch: Any, m: int, rows: slice) -> Any:
    """Return the same structure with only some of the m examples. Arrays are views."""
    if _is_array(batch):
        return batch[rows] if batch.ndim > 0 else batch
    if isinstance(batch, Mapping):
        items = {key: _part(x, m, rows) for key, x in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return items
        part = copy.copy(batch)  # defaultdict, Hugging Face's BatchEncoding ... have constructors of their own
        part.update(items)
        return part
    if isinstance(batch, list) and len(batch) == m and all(isinstance(x, str | bytes) for x in batch):
        return batch[rows]  # default_collate leaves texts as a list: one per example
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_part(x, m, rows) for x in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_part(x, m, rows) for x in batch)
    return batch
