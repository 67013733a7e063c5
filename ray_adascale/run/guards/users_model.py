"""The user's model in a run: the optimizer has its parameters as they were when the run
was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..._errors import listed


class UsersModel:
    """Refuses parameters that the program replaces or adds after the run was built.

    A replaced parameter raises in its line. A new part is looked at before the next
    backward pass, since a loop may put the old one back, and after it, since a part
    without gradients needs no training; and all of the model at each report, since
    torch calls no hook for what is written past a module's attributes.

    Args:
        module: The bare model.
        trained: The parameters that the optimizer has.
        keeps_parameters: Whether the model's parameters stay the same objects.
            ``fully_shard`` replaces them: there the modules that have them count.

    Attributes:
        changed: Whether the program has given any module a part since a pass of which
            all parts were as before.
    """

    def __init__(
        self, module: nn.Module, trained: Iterable[Tensor], *, keeps_parameters: bool
    ) -> None:
        self._module = module
        self._keeps_parameters = keeps_parameters
        self._owners: dict[str, nn.Module] = {}
        self._names: dict[Tensor, str] = {}
        self.changed = False
        self.add(trained)

    def add(self, trained: Iterable[Tensor]) -> None:
        """Note parameters that the optimizer has."""
        known = set(trained)
        for name, owner, p in _owned(self._module):
            if p in known:
                self._owners[name] = owner
                if self._keeps_parameters:
                    self._names[p] = name

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Return a context for a loop over the run."""
        replaced = self._names.keys() - set(self._module.parameters())
        if replaced:
            _refuse_replaced([name for p, name in self._names.items() if p in replaced])
        handles = (
            register_module_parameter_registration_hook(self._on_parameter),
            register_module_module_registration_hook(self._on_part),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_parameter(
        self, owner: nn.Module, name: str, new: nn.Parameter | None
    ) -> None:
        self.changed = True
        old = dict(owner.named_parameters(recurse=False)).get(name)
        if old is not None and old is not new and old in self._names:
            _refuse_replaced([self._names[old]])

    def _on_part(self, *_: Any) -> None:
        self.changed = True

    def check(self) -> None:
        """Check that the optimizer has all parameters of the model that are trained.

        Raises:
            RuntimeError: It has not.
        """
        there = list(_owned(self._module))
        replaced = self._owners.keys() - {name for name, _, _ in there}
        new = {}
        for name, owner, p in there:
            of_run = self._owners.get(name) is owner
            if self._names:
                of_run = p in self._names
            if of_run or not p.requires_grad:
                continue
            new[name] = p
            if name in self._owners:
                replaced.add(name)
        # A part beside the others, such as a teacher, is trained if it has gradients.
        if replaced or any(p.grad is not None for p in new.values()):
            self._refuse(list(new))

    def check_ended(self) -> None:
        """Check a pass that has ended, as :meth:`check` does."""
        self.check()
        self.changed = False

    def _refuse(self, new: list[str]) -> None:
        if new:
            raise RuntimeError(
                f"No parameter group has {listed(new)}, which the program has added to "
                "the model or unfrozen since the run was built (a new layer, "
                "weight_norm or another parametrization), so steps would not train "
                "them. Change the model before the optimizer and the run are built. To "
                "change it in the middle, leave the loop, and build the optimizer and "
                "a run anew: Run(..., starting_step=int(run.effective_steps)), with "
                "checkpoints in another folder; or attach(..., starting_step=)."
            )


def _owned(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield each parameter once: its name, the module that has it, and itself."""
    parts = dict(module.named_modules())
    for name, p in module.named_parameters():
        yield name, parts[name.rpartition(".")[0]], p


def _refuse_replaced(names: list[str]) -> None:
    raise RuntimeError(
        f"The program has replaced {listed(names)} of the model since the run was "
        "built, and the optimizer would go on to step the old values. Leave "
        "assign=True out of load_state_dict(), or write in place of module.weight = "
        "...: with torch.no_grad(): module.weight.copy_(...)."
    )
