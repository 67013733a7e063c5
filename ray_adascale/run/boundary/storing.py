"""The progress of a worker that stores a checkpoint.

The driver's process for messages reads it. That process loads no torch, so neither does
this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Storing:
    """One worker's share of a checkpoint that is being written or stored.

    Attributes:
        rank: The worker's number.
        step: Optimizer steps in the checkpoint.
        place: Where it is stored.
        stored: Bytes that are there: written by this worker, or seen on the storage, of
            all workers. A bucket shows a file once it is whole.
        seconds: Seconds so far.
        still_s: Seconds since bytes were last added.
    """

    rank: int
    step: int
    place: str
    stored: int = 0
    seconds: float = 0.0
    still_s: float = 0.0

    def after(self, seconds: float) -> Storing:
        """Return what is known some seconds later, without news."""
        return replace(
            self, seconds=self.seconds + seconds, still_s=self.still_s + seconds
        )

    def description(self) -> str:
        """Return the storing as the beginning of a sentence."""
        still = f", none in the last {self.still_s:.0f} s" if self.still_s > 10 else ""
        return (
            f"Worker {self.rank} has been storing the checkpoint of optimizer step "
            f"{self.step:,} in {self.place} for {self.seconds:.0f} s: "
            f"{self.stored / 1e6:,.1f} MB are there{still}"
        )

    def given_up(self, limit_s: float) -> str:
        """Return the error message of a storing that is ended, because no byte was
        added for a time.

        Args:
            limit_s: Seconds without a new byte that are allowed.
        """
        return (
            f"{self.description()}. It is given up after "
            f"AdaScaleConfig(store_timeout_s={limit_s:g}) without progress."
        )
