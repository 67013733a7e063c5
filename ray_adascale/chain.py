"""Several optimizers as one: each steps its own parameters, and all of them are
read, saved and scheduled together.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from . import _hooks

SEVERAL_OPTIMIZERS = (
    "There is one gain and one clock, and several optimizers would each advance the "
    "clock. Make them one: ray_adascale.OptimizerChain([Muon(matrices, ...), "
    "AdamW(the_rest, ...)]) for different classes, or one optimizer with several "
    "parameter groups. Networks that train in turn, as a GAN's, have a clock each: one "
    "attach() for each network."
)
"""What to do with a list of optimizers, as the end of an error message."""


class OptimizerChain(Optimizer):
    """Several optimizers of different parameters as one ``torch.optim.Optimizer``, such
    as Muon and AdamW.

    A step steps each of them, in the given order. :attr:`param_groups` are the
    optimizers' own dicts, the first optimizer's first, so one scheduler drives all
    groups, and a change to a group acts on its optimizer. The state dict has the form
    of one optimizer with all the groups. The optimizers stay usable: a change to one of
    them is seen here.

    Args:
        optimizers: The optimizers. No parameter may be in two of them.

    Raises:
        ValueError: An optimizer can't be part of a chain, or a parameter is in two of
            them.
    """

    refuses_chain = (
        "A chain can't be part of another chain. List its optimizers in one chain."
    )
    """Error message for a member of this class. Other classes that can't be members
    have the attribute as well.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        if isinstance(optimizers, Optimizer):
            raise ValueError(
                "Invalid optimizers: one optimizer. Must be a list, as in "
                "OptimizerChain([muon, adamw])."
            )
        members = tuple(optimizers)
        if not members:
            raise ValueError(
                "Invalid optimizers: the list is empty. Must hold at least one "
                "torch.optim.Optimizer."
            )
        for member in members:
            _check_member(member)
        self._optimizers = members
        # (number of the optimizer, number of the group in it) of each group
        self._order = [
            (i, k)
            for i, member in enumerate(members)
            for k in range(len(member.param_groups))
        ]
        # gives the hook registries and step profiling of Optimizer, without owning
        # groups
        super().__setstate__({})
        self._check_disjoint()

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the chain."""
        return self._optimizers

    def parts(self) -> list[tuple[Optimizer, list[int]]]:
        """Return each optimizer with the numbers of its groups in
        :attr:`param_groups`.
        """
        order = self._groups_in_order()
        return [
            (member, [g for g, (i, _) in enumerate(order) if i == n])
            for n, member in enumerate(self._optimizers)
        ]

    # ---- interface of torch.optim.Optimizer ------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' own groups, in a new list. Groups that were added later
        come last.
        """
        return [self._optimizers[i].param_groups[k] for i, k in self._groups_in_order()]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        order = self._groups_in_order()
        if len(value) != len(order):
            raise ValueError(
                f"Invalid param_groups: {len(value)} groups. The chain's optimizers "
                f"have {len(order)}."
            )
        for (i, k), group in zip(order, value, strict=True):
            self._optimizers[i].param_groups[k] = group

    @property
    def state(self) -> Any:
        """The optimizers' states as one mapping, by parameter. A mapping that is set
        here is shared by all of them.
        """
        first = self._optimizers[0].state
        return (
            first
            if all(member.state is first for member in self._optimizers)
            else _States(self)
        )

    @state.setter
    def state(self, value: Any) -> None:
        for member in self._optimizers:
            member.state = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The first optimizer's default of each hyperparameter that every optimizer
        has.
        """
        first, *others = (member.defaults for member in self._optimizers)
        return {
            key: value
            for key, value in first.items()
            if all(key in other for other in others)
        }

    def __repr__(self) -> str:
        return f"OptimizerChain([{', '.join(map(repr, self._optimizers))}])"

    @_hooks.around_own_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer, in order.

        Args:
            closure: Evaluates the model once, before the first optimizer steps, and
                returns the loss, which is then returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self._optimizers:
            member.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self._optimizers:
            member.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to one of the optimizers. It becomes the last one of
        :attr:`param_groups`.

        Args:
            param_group: The group. ``param_group["optimizer"]`` is the number of the
                optimizer in the chain; it may be missing if there is only one.

        Raises:
            ValueError: The number is missing or wrong, or a parameter is in the chain
                already.
        """
        group = dict(param_group)
        number = group.pop("optimizer", 0 if len(self._optimizers) == 1 else None)
        if (
            isinstance(number, bool)
            or not isinstance(number, int)
            or not 0 <= number < len(self._optimizers)
        ):
            kinds = ", ".join(
                f"{i} ({type(member).__name__})"
                for i, member in enumerate(self._optimizers)
            )
            raise ValueError(
                f"Invalid optimizer={number!r} of the parameter group. Must be the "
                f"number of one of the chain's optimizers: {kinds}."
            )
        member = self._optimizers[number]
        member.add_param_group(group)
        try:
            self._check_disjoint()
        except ValueError:
            member.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all groups, in the form of one optimizer, each part by
        its optimizer's own ``state_dict``.

        What a hook on one of the optimizers adds to its part is under ``"members"``.
        """
        first, *others = (member.state for member in self._optimizers)
        # sharded: the whole has hooks, in OSS
        if any(state is first for state in others):
            return super().state_dict()
        _hooks.before_save(self)
        firsts = list(
            itertools.accumulate(
                (len(group["params"]) for group in self.param_groups), initial=0
            )
        )
        state: dict[Any, Any] = {}
        groups: dict[int, dict[str, Any]] = {}
        added = []
        for member, numbers in self.parts():
            part = dict(member.state_dict())
            # the member's number of a parameter → the chain's
            place: dict[Any, int] = {}
            for g, group in zip(numbers, part.pop("param_groups"), strict=True):
                for i, number in enumerate(group["params"], firsts[g]):
                    place.setdefault(number, i)
                groups[g] = {
                    **group,
                    "params": [place[number] for number in group["params"]],
                }
            state.update(
                {place.get(key, key): value for key, value in part.pop("state").items()}
            )
            added.append(part)
        whole = {
            "state": state,
            "param_groups": [groups[g] for g in range(len(groups))],
        }
        return _hooks.after_save(
            whole | ({"members": added} if any(added) else {}), self
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``, each optimizer by its own loader. The argument is left
        unchanged.

        Raises:
            ValueError: The groups differ in number or size.
        """
        state_dict = _hooks.before_load(state_dict, self)
        saved = state_dict["param_groups"]
        check_sizes(saved, self.param_groups)
        everywhere = {i for group in saved for i in group["params"]}
        added = state_dict.get("members", [{}] * len(self._optimizers))
        for (member, numbers), more in zip(self.parts(), added, strict=True):
            groups = [saved[g] for g in numbers]
            own = {i for group in groups for i in group["params"]}
            # torch's loader copies entries that belong to no parameter, so each
            # optimizer gets them.
            state = {
                i: value
                for i, value in state_dict["state"].items()
                if i in own or i not in everywhere
            }
            member.load_state_dict({"state": state, "param_groups": groups, **more})
        _hooks.after_load(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_optimizers": self._optimizers, "_order": self._order}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        super().__setstate__({})

    # ---- a worker's share of a sharded chain -----------------------------------------

    def empty_share(self) -> OptimizerChain:
        """Return a chain without groups, of copies of the optimizers, for a worker's
        share of this one.
        """
        share = object.__new__(type(self))
        # as patched by a scheduler
        own = {key: value for key, value in vars(self).items() if key != "step"}
        share.__setstate__(
            {
                **own,
                "_optimizers": tuple(map(empty_copy, self._optimizers)),
                "_order": [],
            }
        )
        return share

    def append_share(self, group: dict[str, Any], of: OptimizerChain) -> None:
        """Append a share of another chain's next group to the same optimizer of this
        chain.
        """
        number, _ = of._groups_in_order()[len(self._order)]
        groups = self._optimizers[number].param_groups
        self._order.append((number, len(groups)))
        groups.append(group)

    # ---- groups ----------------------------------------------------------------------

    def _groups_in_order(self) -> list[tuple[int, int]]:
        """Return the place of each group, including groups added since."""
        if len(self._order) != sum(
            len(member.param_groups) for member in self._optimizers
        ):
            known = set(self._order)
            for i, member in enumerate(self._optimizers):
                self._order += [
                    (i, k)
                    for k in range(len(member.param_groups))
                    if (i, k) not in known
                ]
        return self._order

    def _check_disjoint(self) -> None:
        """Raise if a parameter is in two optimizers.

        Raises:
            ValueError: One is.
        """
        holders: dict[int, int] = {}
        names = [type(member).__name__ for member in self._optimizers]
        for n, member in enumerate(self._optimizers):
            for p in (p for group in member.param_groups for p in group["params"]):
                other = holders.setdefault(id(p), n)
                if other != n:
                    raise ValueError(
                        f"A parameter of shape {tuple(p.shape)} is in optimizer "
                        f"{other} ({names[other]}) and in optimizer {n} ({names[n]}) "
                        "of the chain. Give each parameter to one of them."
                    )

    def _holder(self, key: Any) -> Optimizer:
        """Return the optimizer that has the state of a key; the parameter's
        optimizer if none has.
        """
        having = (member for member in self._optimizers if key in member.state)
        owning = (
            m
            for m in self._optimizers
            if any(p is key for group in m.param_groups for p in group["params"])
        )
        for member in itertools.chain(having, owning):
            return member
        raise KeyError(key)


class _States(MutableMapping[Any, Any]):
    """The states of a chain's optimizers, as one mapping. An entry is read from and
    written to its optimizer.

    Args:
        chain: The chain.
    """

    def __init__(self, chain: OptimizerChain) -> None:
        self._chain = chain

    def __getitem__(self, key: Any) -> Any:
        # a new entry of a parameter is made, as in an optimizer's own state
        return self._chain._holder(key).state[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return next(
            (
                member.state[key]
                for member in self._chain.optimizers
                if key in member.state
            ),
            default,
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self._chain._holder(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._chain._holder(key).state[key]

    def __contains__(self, key: object) -> bool:
        return any(key in member.state for member in self._chain.optimizers)

    def __iter__(self) -> Iterator[Any]:
        for member in self._chain.optimizers:
            yield from member.state

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._chain.optimizers)

    def __repr__(self) -> str:
        return repr(dict(self))


def check_sizes(
    saved: Iterable[dict[str, Any]], groups: Iterable[dict[str, Any]]
) -> None:
    """Check that the groups of a state dict are those of an optimizer, by their numbers
    of parameters.

    Raises:
        ValueError: They are not.
    """
    theirs, own = ([len(group["params"]) for group in each] for each in (saved, groups))
    if theirs != own:
        raise ValueError(
            f"The state dict has parameter groups of {theirs} parameters, the "
            f"optimizer of {own} parameters."
        )


def parts_of(optimizer: Optimizer) -> list[tuple[Optimizer, list[int]]]:
    """Return the plain optimizers of an optimizer, each with the numbers of its
    groups: a chain's, or the optimizer itself.
    """
    if isinstance(optimizer, OptimizerChain):
        return optimizer.parts()
    return [(optimizer, list(range(len(optimizer.param_groups))))]


def largest_part(optimizer: Optimizer) -> Optimizer:
    """Return the plain optimizer with the most elements: one of a chain's, or the
    optimizer itself.
    """
    parts = [part for part, _ in parts_of(optimizer)]
    return max(
        parts,
        key=lambda part: sum(
            p.numel() for group in part.param_groups for p in group["params"]
        ),
    )


def empty_copy(optimizer: Optimizer) -> Optimizer:
    """Return a copy of an optimizer of any class and any constructor, without
    groups, for a worker's share of it.
    """
    if isinstance(optimizer, OptimizerChain):
        return optimizer.empty_share()
    copied: Optimizer = object.__new__(type(optimizer))
    # A scheduler's patched `step` belongs to the original.
    copied.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    copied.param_groups = []
    return copied


def needs_closure(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer class can't step without a closure, since it
    evaluates the model within the step.
    """
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_member(member: Any) -> None:
    """Raise if an object can't be part of a chain.

    Raises:
        ValueError: It can't.
    """
    name = type(member).__name__
    if not isinstance(member, Optimizer):
        raise ValueError(
            f"Invalid optimizers: one is of type {name}. Each must be a "
            "torch.optim.Optimizer."
        )
    # AdaScale and OSS give the reason on their classes, since this module does not
    # import them.
    refusal: str | None = getattr(type(member), "refuses_chain", None)
    if refusal is not None:
        raise ValueError(refusal)
    if "_sharded" in vars(member):
        raise ValueError(
            f"The {name} is sharded by OSS already. Chain the plain optimizers, then "
            "OSS.wrap(chain)."
        )
    if isinstance(member, LBFGS) or needs_closure(type(member)):
        raise ValueError(
            f"{name} can't be part of a chain: it evaluates the model within its step, "
            "where the other optimizers' parameters would change in between."
        )
