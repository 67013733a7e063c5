"""Where the tensors of a test are: on the GPU those that its own functions make,
anywhere else those of the library and torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_TESTS = f"{Path(__file__).parent}/"
# Their tensors are their caller's: a layer makes its parameters, functional and _VF
# make what a test asked of them.
_TRANSPARENT = (
    "/torch/nn/modules/",
    "/torch/functional.py",
    "/torch/overrides.py",
    "/torch/_jit_internal.py",
)


def here() -> torch.device:
    """Return the device that this process's test is for: with a process group that
    of its backend, else the CPU.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Placed(TorchFunctionMode):
    """A mode in which functions of the tests make tensors on ``device``, unless they
    name another.

    The library's own tensors stay where the library says, so that a device it forgot
    shows as an error. Values are those that the CPU would have drawn. ``numpy()`` in a
    test copies to the CPU first.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._constructors = _device_constructors()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.numpy and args[0].is_cuda and _is_of_a_test(sys._getframe(1)):
            return func(args[0].cpu(), *args[1:], **kwargs)
        if (
            func in self._constructors
            and _names_no_device(args, kwargs)
            and _is_of_a_test(sys._getframe(1))
        ):
            needs_grad = kwargs.pop("requires_grad", False)
            return (
                func(*args, **{**kwargs, "device": "cpu"})
                .to(self.device)
                .requires_grad_(needs_grad)
            )
        return func(*args, **kwargs)


def _names_no_device(args: Any, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("pin_memory") or kwargs.get("out") is not None:
        return False
    # torch.as_tensor(x) of a tensor is where x is.
    return kwargs.get("device") is None and not (args and isinstance(args[0], Tensor))


def _is_of_a_test(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TESTS) and name != __file__:
            return True
        if name != __file__ and not any(part in name for part in _TRANSPARENT):
            return False
        frame = frame.f_back
    return False
