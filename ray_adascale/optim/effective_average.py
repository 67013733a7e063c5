"""An average of the weights on the effective clock: its memory in τ is the same at
every scale.
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .._errors import SettingError
from .._torch import is_dtensor


class EffectiveAverage(AveragedModel):
    """Exponential moving average of a model's weights with decay^r a step, where r is
    the step's advance of τ.

    A constant decay a step would average over r times as much training at a larger
    scale. At S = 1 it is torch's ``AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)``, to the bit::

        average = EffectiveAverage(model, 0.999)
        run = Run(..., after_step=average.update_parameters, extra_state={"average": average})
        ...
        accuracy(average.module)

    In a loop of your own, give the advance of the clock:
    ``average.update_parameters(model, optimizer.effective_steps - before)``.

    Args:
        model: The bare model, before it is wrapped or sharded. Its present mode is that
            of the average: put it in eval mode by ``average.eval()``.
        decay: Factor on the average in each step of the base run, from 0 to 1.
        use_buffers: Whether buffers are averaged; else they are those of the model.

    Raises:
        ValueError: ``decay`` is out of range.
    """

    def __init__(
        self, model: nn.Module, decay: float, *, use_buffers: bool = False
    ) -> None:
        if not 0 <= decay <= 1:
            raise SettingError("Invalid {}. Must be from 0 to 1.", "", decay=decay)
        super().__init__(
            model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers
        )
        self.decay = decay

    def update_parameters(self, model: nn.Module, gain: float = 1.0) -> None:
        """Add the model's weights to the average.

        Args:
            model: The model.
            gain: r, the advance of τ since the last call; 0 after a skipped step.

        Raises:
            ValueError: ``gain`` is negative or not finite, or the model is sharded and
                the average is not.
        """
        if any(map(is_dtensor, model.parameters())) and not any(
            map(is_dtensor, self.parameters())
        ):
            raise ValueError(
                "EffectiveAverage was made of whole weights, and the model is sharded "
                "by now (sharding='fsdp2'). Use sharding='zero2', 'oss' or 'none' with "
                "an average of the weights."
            )
        if not (gain >= 0 and math.isfinite(gain)):
            raise SettingError(
                "Invalid {}. Must be the advance of the effective steps.", "", gain=gain
            )
        self.multi_avg_fn = get_ema_multi_avg_fn(self.decay**gain)
        super().update_parameters(model)
