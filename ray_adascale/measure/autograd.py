"""What is asked of autograd: the end of a backward pass, a gradient's node, and
refusals of what hides passes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

REENTRANT = (
    "Reentrant activation checkpointing runs backward passes within the backward pass, "
    "so AdaScale can't tell gradient samples apart. Use "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), and with "
    "transformers' Trainer TrainingArguments(gradient_checkpointing_kwargs="
    "{'use_reentrant': False})."
)


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has ended, after the callbacks
    that were queued before (DDP's wait).

    torch has no public name for this; DDP, FSDP2 and FairScale use the same one. Only
    to be called inside a hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulator_of(leaf: Tensor) -> Any:
    """Return the node that adds gradients to ``leaf.grad``, also for a frozen leaf.

    The tensor's own hooks have run when autograd comes to the node, whenever they were
    registered. ``autograd.grad`` does not run it. A leaf has one node as long as
    somebody holds the node, until the leaf's dtype or device changes.
    """
    frozen = not leaf.requires_grad
    if frozen:
        # a frozen leaf has a node too, but torch does not give it
        leaf.requires_grad_(True)
    try:
        return torch.autograd.graph.get_gradient_edge(leaf).node
    finally:
        if frozen:
            leaf.requires_grad_(False)


def is_hooked(leaf: Tensor) -> bool:
    """Whether somebody has registered a hook on a leaf's gradient. torch has no
    public name for this.
    """
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def on_pass(
    params: Sequence[Tensor], called: Callable[[Tensor], None]
) -> list[RemovableHandle]:
    """Call a function in each backward pass that accumulates a gradient of the first or
    the last trainable parameter.

    Returns:
        Handles of the hooks. They are those of the tensor, which stay when it is cast
        or moved.
    """
    trainable = [p for p in params if p.requires_grad and p.is_leaf]
    ends = dict.fromkeys([*trainable[:1], *trainable[-1:]])
    return [p.register_post_accumulate_grad_hook(called) for p in ends]


def in_compiled_autograd() -> bool:
    """Whether the calling hook is part of a backward pass that compiled autograd has
    taken over.

    torch has no public name for this. ``torch.compiler.is_compiling()`` is also true in
    hooks that ``torch.compile`` traces as part of a compiled training step, and those
    hooks work.
    """
    # compiled autograd imports it
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def refuse_compiled() -> None:
    """Raise under compiled autograd. The hook that begins a pass calls it.

    The compiled graph would contain the hook, but not the callbacks that the hook
    queues for the end: gains came out as 1.

    Raises:
        RuntimeError: Compiled autograd runs this backward pass.
    """
    if in_compiled_autograd():
        raise RuntimeError(
            "AdaScale can't measure gradients under compiled autograd. Leave "
            "torch._dynamo.config.compiled_autograd off; torch.compile of the model is "
            "supported."
        )


def refuse_nested() -> None:
    """Raise within reentrant activation checkpointing. The hook that begins a pass
    calls it.

    Reentrant checkpointing runs a backward pass for each part, with an end of its own,
    and the end of the outer pass can't be seen from inside. If a gradient outside the
    checkpointed parts comes first, the pass that begins is the outer one.

    Raises:
        RuntimeError: The pass that begins is a nested one.
    """
    # If torch.compile traces this hook, it supports no frames; it traces no nested
    # backward passes either.
    frame = None if torch.compiler.is_compiling() else sys._getframe()
    nested = CheckpointFunction.backward.__code__
    while frame is not None:
        if frame.f_code is nested:
            raise RuntimeError(REENTRANT)
        frame = frame.f_back
