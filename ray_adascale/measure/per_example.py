"""Squared norms of the gradients of single examples, from one backward pass over a batch.

A batch of m examples holds m gradient samples. The backward pass adds them up, but their squared norms follow from the input and
the output gradient of each layer, example by example. For a linear layer on vectors, for instance, ``‖g_e‖² = ‖a_e‖²·‖δ_e‖²``.
Sources: Goodfellow, *Efficient Per-Example Gradient Computations* (arXiv 1510.01799); Gray et al., *Normalization Layer
Per-Example Gradients are Sufficient to Predict Gradient Noise Scale in Transformers* (arXiv 2411.00999).

Exact for Linear, Conv1d, Conv2d, Embedding, LayerNorm, GroupNorm and RMSNorm, on vectors and over positions, also if the model
calls a layer several times. A parameter that two layers share, batch norm, recurrent layers, attention in one module and
parameters of the user's own modules are not covered. ``layers`` has the formulas.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_dtensor
from .layers import COUPLING, LayerRule, Operands, rule_of, sum_over_positions
from .norms import take_norm
from .observers import queue_end_of_backward, refuse_compiled, refuse_nested

_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05}
"""Relative difference allowed between a gradient and its sum over examples, by dtype of the output gradient; else 1e-3."""

_CALLS = 0.2
"""Share of the time of a pass that hooks and small operations add, by the table of a study on CPUs (docs/results.md)."""


@dataclass
class _Call:
    """One call of a layer in a forward pass, and its output gradient once the backward pass has computed it."""

    a: Tensor
    delta: Tensor | None = None


@dataclass
class _Layer:
    """A covered layer.

    Attributes:
        name: Name in the model.
        module: The module.
        rule: Its rule.
        groups: Parameter group of "weight" and "bias", as far as they are measured.
        calls: Calls whose output gradients are awaited.
    """

    name: str
    module: Any
    rule: LayerRule
    groups: dict[str, int]
    calls: list[_Call] = field(default_factory=list)


def not_covered(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> list[str]:
    """Return a phrase for each module or parameter without per-example norms; empty if all have them.

    Args:
        model: The model.
        groups: The parameters to measure, by parameter group. Frozen ones are left out.
    """
    return _layers(model, groups)[1]


def _layers(model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> tuple[list[_Layer], list[str]]:
    """Return the layers that hold the parameters, and a phrase for each module or parameter that is not covered."""
    group_of = {p: g for g, params in enumerate(groups) for p in params if p.requires_grad}
    layers: list[_Layer] = []
    problems: list[str] = []
    owners: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__})"
        if isinstance(module, COUPLING):
            problems.append(f"{what}, which couples the examples of a batch")
            owners.update((p, name) for p in module.parameters())
            continue
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        wanted = {key: group_of[p] for key, p in own.items() if p in group_of}
        if not wanted:
            continue
        rule = rule_of(module)
        shared = [key for key in wanted if own[key] in owners]
        owners.update((own[key], f"{name}.{key}") for key in wanted if key not in shared)
        if rule is None or not wanted.keys() <= {"weight", "bias"}:
            problems.append(what)
        elif (setting := rule.problem(module)) is not None:
            problems.append(f"{what} with {setting}")
        elif shared:
            problems.append(f"{name}.{shared[0]}, which is also {owners[own[shared[0]]]}")
        else:
            layers.append(_Layer(name or type(module).__name__, module, rule, wanted))
    outside = sum(p not in owners for p in group_of)
    if outside:
        problems.append(f"{outside} parameters that no module of the model holds")
    return layers, problems


@dataclass(frozen=True)
class MeasuredPasses:
    """The measurement of one worker's backward passes.

    Attributes:
        sq_norms: Σ_e ‖g_e/m‖² per parameter group, float64 ``[groups]``. g_e is the gradient of example e's own loss; the loss of
            a pass is the mean over its m examples. The factor and the loss scale that a loss carried are in it.
        examples: Examples of all passes, as the layers saw them.
        problem: Why the numbers are not valid; None if they are.
        doubtful: Whether the numbers may be wrong without a fault of the model. There are three causes. A comparison with the
            gradients was due, and they are not finite. Other parameters are trainable than at :meth:`ExampleNorms.begin`. Or an
            exception ended one of several passes.
        cost: Estimate of the time that measuring added, as a share of that of the passes, from the shapes of the layers.
    """

    sq_norms: Tensor
    examples: int
    problem: str | None
    doubtful: bool
    cost: float


class ExampleNorms:
    """Measures the squared gradient norms of single examples in the backward passes between :meth:`begin` and :meth:`end`.

    Gradients stay unchanged, to the bit. Hooks are in place only in between. Within activation checkpointing the numbers are
    right, but the inputs of the layers inside stay in memory. There is no host synchronization, except in :meth:`end` until the
    model is :attr:`verified`.

    Args:
        model: The model, or one that wraps it for data parallelism.
        groups: The parameters to measure, by parameter group. Those that are frozen when :meth:`begin` is called are left out.

    Attributes:
        trainable: Whether each parameter was trainable at the last :meth:`begin`; the measured ones were.
        verified: Whether a measurement has shown that the model is covered; the caller sets it, once no worker has doubts. Until
            then the sum over examples is compared with each parameter's gradient, which finds a parameter that is used outside
            its layer's forward pass. And where a dimension of a layer's input is as long as the batch, a backward pass to the
            first layer shows which one is that of the examples. A comparison costs the memory and the time of one more gradient.
            Other trainable parameters begin it anew. Sharded parameters are never compared: hooks don't get their gradients.

    Raises:
        ValueError: A parameter is not covered; :func:`not_covered` names it.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[Tensor]]) -> None:
        self._model = model
        self._params = [list(params) for params in groups]
        self._groups = len(groups)
        self._device = next((p.device for params in groups for p in params), torch.device("cpu"))
        self._measuring = False
        self._handles: list[Any] = []
        self._tracing = False
        self._comparable = not any(is_dtensor(p) for params in groups for p in params)
        self._find_layers()
        if self._uncovered is not None:
            raise ValueError(f"P{self._uncovered[1:]}.")

    def _find_layers(self) -> None:
        """Find the layers of the parameters that are trainable now."""
        self.trainable, self.verified = self._trainable_now(), not self._comparable
        self._layers, problems = _layers(self._model, self._params)
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        what = f"per-example norms are not available for {', '.join(problems[:3])}{more}"
        self._uncovered = what if problems else None
        self._confined: set[str] = set()  # layers that were seen to keep the examples in the first dimension
        self._reset()

    def expect_examples_first(self) -> None:
        """Assume that the first dimension of each layer's input is that of the examples, as an earlier process has seen."""
        self._confined = {layer.name for layer in self._layers}

    def _trainable_now(self) -> list[bool]:
        return [p.requires_grad for params in self._params for p in params]

    @property
    def changed(self) -> bool:
        """Whether other parameters are trainable than those that are measured. The next :meth:`begin` measures these."""
        return self.trainable != self._trainable_now()

    def _reset(self) -> None:
        self._sums: list[tuple[int, Tensor]] = []
        self._problem: str | None = None
        # Autograd drops this callback if an exception ends the pass, so a dead reference shows an interrupted pass.
        self._pass_end: weakref.ref[Callable[[], None]] | None = None
        self._lost = (
            False  # whether the norms of earlier passes of the step were cleared with those of an interrupted pass
        )
        self._rows: int | None = None  # m of the pass, as the layers see it
        self._fitting: set[str] = set()  # layers of the pass whose first dimension is m
        self._examples = 0
        self._extra, self._forward = 0.0, 0.0  # multiplications
        self._verify = False
        self._first: Tensor | None = None  # the output of the first layer of a verified pass
        self._expected: dict[Tensor, Tensor] = {}
        self._tolerance: dict[Tensor, float] = {}
        self._found: dict[Tensor, Tensor] = {}
        for layer in self._layers:
            layer.calls = []

    @property
    def _in_pass(self) -> bool:
        return self._pass_end is not None and self._pass_end() is not None

    @property
    def _interrupted(self) -> bool:
        """Whether an exception ended the last backward pass, as when memory ran out."""
        return self._pass_end is not None and self._pass_end() is None

    def _forget_interrupted(self) -> None:
        """Forget what an interrupted pass has left. A loop that goes on has cleared its gradients and repeats the step."""
        verify, lost = self._verify, self._examples > 0
        self._reset()
        self._verify, self._lost = verify, lost

    @property
    def measuring(self) -> bool:
        """Whether passes are measured now."""
        return self._measuring

    def begin(self) -> None:
        """Measure the passes from the next forward pass on: the gradients of the parameters that are trainable now."""
        self.cancel()
        if self.changed:
            self._find_layers()
        self._measuring, self._verify = True, not self.verified
        if self._uncovered is not None:
            return  # `end` reports it
        for layer in self._layers:
            self._handles.append(layer.module.register_forward_hook(self._forward_hook(layer)))
            if self._verify:
                for key in layer.groups:
                    p = getattr(layer.module, key)
                    self._handles.append(p.register_hook(self._gradient_hook(p)))

    def end(self) -> MeasuredPasses:
        """Stop measuring, and return the measurement of the backward passes since :meth:`begin`."""
        if self._in_pass:
            self._end_pass()  # the gradients are complete, but this is called before the engine's end of the pass
        problem, doubtful = self._uncovered or self._problem, self.changed or self._lost or self._interrupted
        if doubtful:
            problem = None  # it may be one of other parameters, or of a part of the step
        elif problem is None and not self._sums:
            problem = "no layer was called by the forward pass of its module"
        elif problem is None and self._verify:
            problem, doubtful = self._difference()
        # Forward and backward pass multiply three times as often as the forward pass.
        cost = _CALLS + self._extra / (3 * self._forward) if self._forward else _CALLS
        measured = MeasuredPasses(self._sum_by_group(), self._examples, problem, doubtful, cost)
        self.cancel()
        return measured

    def cancel(self) -> None:
        """Stop measuring without a result; remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._measuring = False
        self._reset()

    def _sum_by_group(self) -> Tensor:
        if not self._sums:
            return torch.zeros(self._groups, dtype=torch.float64, device=self._device)
        squares = [x for _, x in self._sums]
        if any(x.dtype is not squares[0].dtype or x.device != squares[0].device for x in squares):
            squares = [x.to(self._device, torch.float64) for x in squares]
        total = torch.stack(squares).to(self._device, torch.float64)
        if self._groups == 1:
            return total.sum().view(1)
        each = [
            [x for (g, _), x in zip(self._sums, total.unbind(), strict=True) if g == group]
            for group in range(self._groups)
        ]
        return torch.stack([torch.stack(xs).sum() if xs else total.new_zeros(()) for xs in each])

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def _forward_hook(self, layer: _Layer) -> Callable[..., None]:
        def called(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if torch.compiler.is_compiling() or not output.requires_grad:
                return
            if not args:
                self._fail(f"{layer.name} is called with keyword arguments")
                return
            if self._interrupted:
                self._forget_interrupted()
            call = _Call(args[0].detach())
            layer.calls.append(call)
            if self._first is None and self._verify:
                self._first = output
            if self._verify and self._is_ambiguous(layer, args[0]) and self._keeps_examples_apart(output):
                self._confined.add(layer.name)
            output.register_hook(lambda delta: self._received(layer, call, delta))

        return called

    @staticmethod
    def _is_ambiguous(layer: _Layer, a: Tensor) -> bool:
        """Return whether a layer's input has another dimension as long as the first, which could be that of the examples."""
        positions = layer.rule.positions(layer.module, a)
        return positions is not None and a.shape[0] > 1 and a.shape[0] in positions

    def _keeps_examples_apart(self, output: Tensor) -> bool:
        """Return whether row 0 of a layer's output depends on row 0 of the first layer's output alone.

        It does if the examples are in the first dimension. If the model has transposed the input of the layer, row 0 is the first
        position of every example, and depends on every row. The examples are in the first dimension of the model's own input.
        """
        if self._first is None or self._first is output:
            return True
        self._tracing = True
        try:
            (grad,) = torch.autograd.grad(output[0].sum(), self._first, retain_graph=True, allow_unused=True)
        except RuntimeError:  # a part of the model can be differentiated once only, as under activation checkpointing
            return False
        finally:
            self._tracing = False
        return grad is not None and not bool(grad[1:].any())

    def _gradient_hook(self, p: Tensor) -> Callable[[Tensor], None]:
        def take(grad: Tensor) -> None:
            self._found[p] = self._found[p] + grad.detach() if p in self._found else grad.detach().clone()

        return take

    @torch.no_grad()
    def _received(self, layer: _Layer, call: _Call, delta: Tensor) -> None:
        if self._tracing:
            return
        if not self._in_pass:
            refuse_compiled()
            refuse_nested()
            # A second pass over the graph of an interrupted one finds layers that have forgotten their calls.
            lost = self._lost or self._interrupted

            def end() -> None:
                self._end_pass()

            queue_end_of_backward(end)
            self._pass_end, self._lost = weakref.ref(end), lost
        call.delta = delta.detach()
        if all(other.delta is not None for other in layer.calls):
            # After the last of several calls, since an example's gradient is the sum over them. A call that the recomputation of
            # activation checkpointing made gets no output gradient: the end of the pass then finishes the layer.
            self._finish(layer, layer.calls)

    @torch.no_grad()
    def _end_pass(self) -> None:
        if not self._in_pass:
            return
        for layer in self._layers:
            if layer.calls:
                self._finish(layer, [call for call in layer.calls if call.delta is not None])
        if self._problem is None and self._rows != 1:
            self._confined |= self._fitting  # for passes with as many positions as examples
        self._examples += self._rows or 0
        self._rows, self._pass_end, self._fitting = None, None, set()

    def _finish(self, layer: _Layer, calls: Sequence[_Call]) -> None:
        layer.calls = []
        if self._problem is not None or not calls or not all(self._rows_fit(layer, call.a) for call in calls):
            return
        self._fitting.add(layer.name)
        x = Operands.joined([_operands(layer, call) for call in calls])
        if "weight" in layer.groups:
            self._sums.append((layer.groups["weight"], layer.rule.weight_sq_norms(x)))
            extra, forward = layer.rule.cost(x)
            self._extra, self._forward = self._extra + extra, self._forward + forward
        if "bias" in layer.groups:
            self._sums.append((layer.groups["bias"], take_norm(sum_over_positions(x.delta)).square()))
        if self._verify:
            self._expect(
                layer, x, max(_TOLERANCE.get(call.delta.dtype, 1e-3) for call in calls if call.delta is not None)
            )

    def _rows_fit(self, layer: _Layer, a: Tensor) -> bool:
        """Return whether the first dimension of an input is that of the examples, as far as shapes show it."""
        positions, shape = layer.rule.positions(layer.module, a), tuple(a.shape)
        if positions is None:
            self._fail(f"{layer.name} has an input without examples, of shape {shape}")
            return False
        m = shape[0]
        if self._rows is None:
            self._rows = m
        if m != self._rows:
            self._fail(f"{layer.name} sees {m} rows where other layers see {self._rows}")
        elif self._is_ambiguous(layer, a) and layer.name not in self._confined:
            self._fail(
                f"{layer.name} has an input of shape {shape}, in which two dimensions are as long as the batch, so which one is "
                "that of the examples can't be seen; another batch size would show it"
            )
        return self._problem is None

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem

    # ---- verification ------------------------------------------------------------------------------------------------

    def _expect(self, layer: _Layer, x: Operands, tolerance: float) -> None:
        expected = {}
        if "weight" in layer.groups:
            expected["weight"] = layer.rule.weight_gradient(layer.module, x)
        if "bias" in layer.groups:
            expected["bias"] = sum_over_positions(x.delta).reshape(-1, layer.module.bias.numel()).sum(0)
        for key, gradient in expected.items():
            p = getattr(layer.module, key)
            gradient = gradient.reshape(p.shape)
            self._tolerance[p] = tolerance
            self._expected[p] = self._expected[p] + gradient if p in self._expected else gradient

    def _difference(self) -> tuple[str | None, bool]:
        """Compare the gradient of each parameter with its sum over examples; waits for the device.

        Returns:
            A phrase that names the first parameter with a difference, None if there is none; and whether there was none because a
            gradient is not finite. The gradients of a step that overflows differ from nothing.
        """
        names, tolerances, rows = [], [], []
        for layer in self._layers:
            for key in layer.groups:
                p = getattr(layer.module, key)
                if p not in self._found and p not in self._expected:
                    continue
                zeros = torch.zeros((), device=p.device).expand(p.shape)
                found, expected = self._found.get(p, zeros), self._expected.get(p, zeros)
                names.append(f"{layer.name}.{key}")
                tolerances.append(self._tolerance.get(p, 1e-3))
                apart, size = take_norm(found.to(torch.float32) - expected.to(torch.float32)), take_norm(found)
                rows.append(torch.stack([apart.double(), size.double()]).to(self._device))
        norms = torch.stack(rows).tolist()
        # The exact gradient of the bias of an attention's keys is zero. Both computed gradients are rounding errors,
        # so their relative difference tells nothing.
        negligible = 0.01 * math.hypot(*(size for _, size in norms if math.isfinite(size)))
        overflowed = False
        for name, tolerance, (apart, size) in zip(names, tolerances, norms, strict=True):
            if not (math.isfinite(apart) and math.isfinite(size)):
                overflowed = True
            elif apart > tolerance * max(size, negligible):
                return (
                    f"the gradient of {name} is not the one of its layer's calls: the parameter is used elsewhere as well",
                    False,
                )
        return None, overflowed


def _operands(layer: _Layer, call: _Call) -> Operands:
    a, delta = call.a, call.delta
    assert delta is not None
    # A layer under autocast multiplies in the precision of its output. Squares of fp16 overflow.
    dtype = torch.float32 if delta.dtype is torch.float16 else delta.dtype
    return layer.rule.operands(layer.module, a.to(dtype) if a.is_floating_point() else a, delta.to(dtype))
