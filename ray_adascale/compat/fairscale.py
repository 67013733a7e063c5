"""AdaScaleWrapper: AdaScale with the constructor of an ordinary optimizer, as
FairScale has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import SGD, Optimizer

from ..optim.adascale import AdaScale


class AdaScaleWrapper(AdaScale):
    """``AdaScale(optim_cls(params, ...))`` for code that makes an optimizer from a
    class and parameters.

    FairScale's names and positions. The other arguments of :class:`AdaScale`
    (``process_group``, ``averaging_window``, ...) are not accepted, since every further
    keyword is the wrapped optimizer's: for those, make the optimizer and wrap it.

    Args:
        params: Parameters or groups, as for any optimizer.
        world_size: Workers that share the batch; see :class:`AdaScale`, also for the
            next four arguments.
        scale: S.
        smoothing: θ.
        num_gradients_to_accumulate: Backward passes per optimizer step.
        debias_ewma: Debiased moving average, or, if False, the paper's.
        optim_cls: Class of the optimizer to wrap.
        **additional_optim_args: Its hyperparameters.

    Raises:
        ValueError: An argument is out of its range, or ``optim_cls`` is no optimizer
            class.
    """

    def __init__(
        self,
        params: Iterable[Any],
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Any,
    ) -> None:
        if not (isinstance(optim_cls, type) and issubclass(optim_cls, Optimizer)):
            raise ValueError(
                f"Invalid {optim_cls=}. Must be an Optimizer class; AdaScale(...) "
                "wraps an instance."
            )
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            # By name: here is_scaled_loss stands before it, so FairScale's positional
            # call would set the wrong one.
            debias_ewma=debias_ewma,
        )
