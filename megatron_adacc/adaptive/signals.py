"""What else is watched beside activations: the loss, and the peak of a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

MEAN_WEIGHT = 0.9  # of the past, in the running mean of the loss
RECENT, FORMER = 10, 1000  # losses over which their variation is averaged
ENOUGH = 100  # losses before the two are compared
NEWS = 0.01  # a peak is reported again when it has grown by this share of the memory


class LossWatch:
    """Compares each loss with the running mean m of those before it, and its recent variation with the former one.

    jump where loss > m + share |m|;   m <- 0.9 m + 0.1 loss,  after a jump m <- loss
    d = ((loss - m) / m)^2 averaged over about 10 and about 1000 losses: recent and former variation

    A loss that is not finite is passed over: the loss scaler deals with it."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.mean: float | None = None
        self.recent = 0.0
        self.former = 0.0
        self.losses = 0

    def jump(self, loss: float) -> str | None:
        """What happened, or None."""
        if not math.isfinite(loss):
            return None
        before = self.mean
        if before is not None and loss > before + self.share * abs(before):
            self.mean = loss
            return f"the loss jumped to {loss:.4g} from a mean of {before:.4g}"
        self.mean = loss if before is None else MEAN_WEIGHT * before + (1 - MEAN_WEIGHT) * loss
        if before:
            self.losses += 1
            deviation = ((loss - before) / before) ** 2
            self.recent += (deviation - self.recent) / min(self.losses, RECENT)
            self.former += (deviation - self.former) / min(self.losses, FORMER)
        return None

    def volatility(self) -> float:
        """How many times the former variation of the loss the recent one is; 1 while too few were seen."""
        if self.losses < ENOUGH or not self.former:
            return 1.0
        return math.sqrt(self.recent / self.former)

    def to_data(self) -> list[float | None]:
        """Its state as builtins."""
        return [self.mean, self.recent, self.former, float(self.losses)]

    def from_data(self, data: Sequence[float | None]) -> LossWatch:
        """A watch of this share at the state of :meth:`to_data`. Raises ValueError when it is none."""
        mean, recent, former, losses = data
        found = LossWatch(self.share)
        found.mean = None if mean is None else float(mean)
        found.recent, found.former, found.losses = float(recent or 0), float(former or 0), int(losses or 0)
        return found


class MemoryWatch:
    """Compares the peak of a device's memory with a share of the whole.

    ``peak_share``: gives the peak so far as a share of the device's memory, None where the device has no account."""

    def __init__(self, share: float, peak_share: Callable[[], float | None]) -> None:
        self.share = share
        self._peak_share = peak_share
        self._reported = 0.0

    @staticmethod
    def total_bytes(device: torch.device) -> int:
        """Of a GPU's memory; 0 on a CPU."""
        return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0

    def above(self) -> tuple[str, float] | None:
        """What happened since the last call, and the peak as a share of the memory; or None."""
        peak = self._peak_share()
        if peak is None or peak <= self.share or peak < self._reported + NEWS:
            return None
        self._reported = peak
        return f"memory had a peak of {peak:.0%} of the device, above {self.share:.0%}", peak


def allocator_peak(device: torch.device) -> float | None:
    """The most that tensors took of a GPU's memory since its peak was last reset; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / MemoryWatch.total_bytes(device)
