"""What else is watched beside activations: the loss, and the peak of a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

MEAN_WEIGHT = 0.9  # of the past, in the running mean of the loss
NEWS = 0.01  # a peak is reported again when it has grown by this share of the memory


class LossWatch:
    """Compares each loss with the running mean m of those before it.

    jump where loss > m + share |m|;   m <- 0.9 m + 0.1 loss,  after a jump m <- loss

    A loss that is not finite is passed over: the loss scaler deals with it."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.mean: float | None = None

    def jump(self, loss: float) -> str | None:
        """What happened, or None."""
        if not math.isfinite(loss):
            return None
        before = self.mean
        if before is not None and loss > before + self.share * abs(before):
            self.mean = loss
            return f"the loss jumped to {loss:.4g} from a mean of {before:.4g}"
        self.mean = loss if before is None else MEAN_WEIGHT * before + (1 - MEAN_WEIGHT) * loss
        return None


class MemoryWatch:
    """Compares the peak of a device's memory with a share of the whole.

    ``peak_share``: gives the peak so far as a share of the device's memory, None where the device has no account."""

    def __init__(self, share: float, peak_share: Callable[[], float | None]) -> None:
        self.share = share
        self._peak_share = peak_share
        self._reported = 0.0

    def above(self) -> str | None:
        """What happened since the last call, or None."""
        peak = self._peak_share()
        if peak is None or peak <= self.share or peak < self._reported + NEWS:
            return None
        self._reported = peak
        return f"memory had a peak of {peak:.0%} of the device, above {self.share:.0%}: lower the limit or the batch"


def allocator_peak(device: torch.device) -> float | None:
    """The most that tensors took of a GPU's memory since its peak was last reset; None on a CPU."""
    if device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device) / total
