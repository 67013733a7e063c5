"""What changes gradients beside a step's backward passes: a loop that clears, clips or scales them."""

from __future__ import annotations

from .._torch import Versions


def check_between(before: Versions, now: Versions, *, told: bool) -> None:
    """Check, as a pass begins, that gradients are those that the step's earlier passes have left.

    Args:
        before: The gradients' versions as the earlier pass ended.
        now: Their versions.
        told: Whether the loop is that of a ``Run``, which clears gradients itself.

    Raises:
        RuntimeError: They are not.
    """
    if now == before:
        return
    cleared = any(then is not None and after is None for then, after in zip(before, now, strict=True))
    raise RuntimeError((CLEARED if cleared else _CHANGED)[told])


CLEARED = {
    True: "Gradients were cleared between the passes of an optimizer step, so all micro-batches but the step's last would be "
    "lost. Delete optimizer.zero_grad() or model.zero_grad() from the loop: run.step() clears the gradients after each step.",
    False: "Gradients were cleared between the passes of an optimizer step, so the earlier ones would be lost. Call "
    "optimizer.zero_grad() once a step, after optimizer.step(), and before a step that is repeated after an exception. The "
    "number of passes is AdaScaleConfig(accumulation=...), or num_gradients_to_accumulate.",
}
_CHANGED = {
    True: "Gradients were changed between the passes of an optimizer step, and the next passes would add to changed gradients. "
    "Delete optimizer.zero_grad() from the loop: run.step() clears the gradients. Clip once a step: run.clip_grad_norm_(), which "
    "does nothing before the last pass, AdaScaleConfig(grad_clip=...), or by hand `if run.is_last_pass:`.",
    False: "Gradients were changed between the passes of an optimizer step, and the next passes would add to changed gradients. "
    "Clip or scale them after the step's last backward pass: `if optimizer.is_last_pass:`.",
}
