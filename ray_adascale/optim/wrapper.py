"""An optimizer around another one: parameter groups, state and unknown names are
those of the wrapped optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Muon, Optimizer

from .._errors import listed
from .._torch import is_dtensor
from ..chain import SEVERAL_OPTIMIZERS, needs_closure, parts_of
from ..sharding.kinds.state import state_of
from .guards import warn_of_steps_past

# GradScaler looks for these on the optimizer that it steps. Forwarded from the wrapped
# optimizer, they would make it pass scaled gradients; without them it unscales first
# and leaves out step() if a gradient is not finite.
_NEVER_FORWARDED = frozenset({"_step_supports_amp_scaling", "grad_scale", "found_inf"})


class OptimizerWrapper(Optimizer):
    """A ``torch.optim.Optimizer`` that owns no parameters: everything that it lacks is
    the wrapped optimizer's.

    A subclass lists the names of its own attributes in ``_parts``: while it is
    unpickled, it lacks them.

    Args:
        optimizer: The optimizer to wrap.

    Raises:
        ValueError: It can't be wrapped.
    """

    _parts: frozenset[str] = frozenset({"_optimizer"})

    _models: Sequence[Tensor] = ()
    """Parameters of the model, in its order, where the model is known. A frozen one
    may be trained later.
    """

    refuses_chain = (
        "AdaScale can't be part of a chain: wrap the chain, "
        "AdaScale(OptimizerChain([...]))."
    )
    """Error message of :class:`ray_adascale.OptimizerChain`, which does not import
    this class.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_wrappable(optimizer)
        _check_values(
            ("", p) for group in optimizer.param_groups for p in group["params"]
        )
        self._optimizer = optimizer
        self.has_step_hooks = False
        """Whether a hook was ever registered on a step of this optimizer, and not on
        the wrapped one's.
        """
        # gives the hook registries and step profiling of Optimizer, without owning
        # groups
        super().__setstate__({})
        warn_of_steps_past(self)

    def register_step_pre_hook(self, hook: Any) -> Any:
        self.has_step_hooks = True
        return super().register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        self.has_step_hooks = True
        return super().register_step_post_hook(hook)

    @property
    def wrapped(self) -> Optimizer:
        """The optimizer that this one wraps: the user's own, or
        :class:`ray_adascale.OSS`.
        """
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self._optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self._optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self._optimizer.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._optimizer.defaults = value

    @property
    def _params(self) -> list[Tensor]:
        """The parameters, in the model's order: a norm that is summed in the groups'
        order would differ in its last bits.
        """
        own = dict.fromkeys(p for group in self.param_groups for p in group["params"])
        return [*dict.fromkeys([*(p for p in self._models if p in own), *own])]

    def __getattr__(self, name: str) -> Any:
        # Only called for names that the wrapper lacks.
        if (
            name in _NEVER_FORWARDED
            or name in self._parts
            or (name.startswith("__") and name.endswith("__"))
        ):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        try:
            return getattr(self._optimizer, name)
        except AttributeError:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and "
                f"neither has the {type(self._optimizer).__name__} that it wraps.",
                name=name,
                obj=self,
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        # __setstate__ makes a new step() and new registries.
        return {
            k: v
            for k, v in self.__dict__.items()
            if k != "step" and not k.startswith("_optimizer_")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})


def check_parameters(model: nn.Module, optimizer: Optimizer, *, alone: bool) -> None:
    """Check that the optimizer has no parameter of another model.

    Args:
        model: The model. Shards (DTensors) are not checked: outside a forward pass the
            model may have others than the optimizer.
        optimizer: The optimizer.
        alone: Check also that it has all trainable parameters. Without this, another
            optimizer may have some of them.

    Raises:
        ValueError: It has not.
    """
    own = {p: name for name, p in model.named_parameters()}
    _check_values((name, p) for p, name in own.items())
    given = {p for group in optimizer.param_groups for p in group["params"]}
    if any(map(is_dtensor, given)):
        return
    if foreign := sum(p not in own for p in given):
        raise ValueError(
            f"{foreign} of the optimizer's {len(given)} parameters are not in the "
            "model, so steps would not train it. Build the optimizer from "
            "model.parameters() after the model is final: after deepcopy, .to() of "
            "another kind of tensor and replaced layers."
        )
    if alone and (
        left_out := [
            name for p, name in own.items() if p.requires_grad and p not in given
        ]
    ):
        raise ValueError(
            f"No parameter group has {listed(left_out)}, which the model trains. Give "
            "them to the optimizer, or freeze what is not to be trained: "
            "part.requires_grad_(False)."
        )


def check_wrappable(optimizer: Optimizer) -> None:
    """Raise if an optimizer can't be wrapped.

    Raises:
        ValueError: It can't.
    """
    if isinstance(optimizer, list | tuple | dict):
        raise ValueError(
            f"Invalid optimizer: a {type(optimizer).__name__} of {len(optimizer)}. "
            f"Must be one. {SEVERAL_OPTIMIZERS}"
        )
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"Invalid optimizer of type {type(optimizer).__name__}. Must be a "
            "torch.optim.Optimizer."
        )
    if isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            "The optimizer is wrapped in AdaScale already. Pass the bare optimizer."
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "AdaScale can't wrap LBFGS, which evaluates the model several times within "
            "one step."
        )
    inner = state_of(optimizer).stepped
    if needs_closure(type(inner)):
        raise ValueError(
            f"AdaScale can't wrap {type(inner).__name__}, whose step needs the "
            "closure: it evaluates the model within the step, and the gain is that of "
            "the gradients before it. Use it without AdaScale."
        )
    for part, _ in parts_of(optimizer):
        for group in part.param_groups:
            if group.get("fused") or isinstance(part, Muon):
                _check_shards(part, group)


def _check_values(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a parameter has no values yet.

    Args:
        named: Parameters with their names; "" where they are unknown.
    """
    for name, p in named:
        what = f"The parameter {name!r}" if name else "A parameter of the optimizer"
        if isinstance(p, UninitializedParameter):
            raise ValueError(
                f"{what} has no shape yet, as of a lazy module. Call the model once on "
                "an example, before the optimizer is built: with torch.no_grad(): "
                "model(example)."
            )
        if p.is_meta:
            raise ValueError(
                f"{what} is on the meta device, and has no values. Build the model "
                "without torch.device('meta'), or give it values before the optimizer "
                "is built: model.to_empty(device='cpu'), and then load or initialize "
                "them."
            )


def _check_shards(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Raise if torch can't step this group's shards (DTensors) with a fused kernel or
    with Muon, by trying it on the smallest.

    Raises:
        ValueError: It can't. Without this check the first step would fail.
    """
    shards = [p for p in group["params"] if is_dtensor(p)]
    if not shards:
        return
    smallest = min(shards, key=lambda p: (p.shape[0], p.numel()))
    shard = torch.zeros_like(smallest, requires_grad=False)
    shard.grad = torch.zeros_like(shard)
    # without the user's hooks, which torch leaves out of copies
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": [shard]}]
    if smallest in optimizer.state:  # some have state from the start
        state = optimizer.state[smallest].items()
        twin.state[shard] = {
            key: value.clone() if torch.is_tensor(value) else value
            for key, value in state
        }
    try:
        twin.step()
    except RuntimeError as e:
        name = type(optimizer).__name__
        workers = cast(Any, smallest).device_mesh.size()
        if group.get("fused"):
            why = (
                f"torch {torch.__version__} has no sharding strategy for its kernel. "
                f"Use {name}(foreach=True)"
            )
        else:
            why = (
                f"torch {torch.__version__} fails with a matrix of shape "
                f"{tuple(smallest.shape)} over {workers} workers. Leave matrices with "
                "fewer rows than workers to the other optimizer of the chain, or use "
                "sharding='zero2'"
            )
        name += "(fused=True)" if group.get("fused") else ""
        raise ValueError(f"{name} can't step the shards of fully_shard: {why}.") from e
