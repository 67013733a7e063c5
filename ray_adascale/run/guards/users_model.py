"""The user's model in a run: the optimizer has its parameters as they were when the run
was built.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    backward pass, since a loop may put the old one back; and all of the model at each
    report, since torch calls no hook for what is written past a module's attributes.

    Args:
        module: The bare model.
        names: Names of the parameters that the optimizer has. Without any nothing is
            looked at.

    Attributes:
        changed: Whether the program has given any module a part since :meth:`check`.
    """

    def __init__(self, module: nn.Module, names: dict[Tensor, str]) -> None:
        self._module = module
        self._names = names
        self.changed = False

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Return a context for a loop over the run."""
        if not self._names:
            yield
            return
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
        """Check that the optimizer has all trainable parameters of the model.

        Raises:
            RuntimeError: It has not.
        """
        self.changed = False
        if not self._names:
            return
        new = [
            name
            for name, p in self._module.named_parameters()
            if p.requires_grad and p not in self._names
        ]
        if new:
            raise RuntimeError(
                f"No parameter group has {listed(new)}, which the program has added to "
                "the model or unfrozen since the run was built (a new layer, "
                "weight_norm or another parametrization), so steps would not train "
                "them. Change the model before the optimizer and the run are built. To "
                "change it in the middle, leave the loop, and build the optimizer and "
                "a run anew: Run(..., starting_step=int(run.effective_steps)), with "
                "checkpoints in another folder."
            )


def _refuse_replaced(names: list[str]) -> None:
    raise RuntimeError(
        f"The program has replaced {listed(names)} of the model since the run was "
        "built, and the optimizer would go on to step the old values. Leave "
        "assign=True out of load_state_dict(), or write in place of module.weight = "
        "...: with torch.no_grad(): module.weight.copy_(...)."
    )
