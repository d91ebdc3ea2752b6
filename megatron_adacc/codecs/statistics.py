"""Statistics of channels, and the list of outlier channels that follows from them.

    a_i = sum |x| over channel i         z_i = (a_i - mean(a)) / std(a)         outlier: z_i > threshold

std is the population's. With C channels z is at most sqrt(C - 1), so a threshold of 3 can find outliers among
11 channels or more. Inf and NaN count as zero, so that one overflow does not hide everything after it.

The statistics are accumulated on the device without a wait. Making the list waits for the device once: that is
for the monitor, at its intervals. Encoding with the list never waits.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.codecs.base import State
from megatron_adacc.codecs.layout import Layout
from megatron_adacc.codecs.options import Implementation
from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load as load_kernel

logger = logging.getLogger(__name__)

LARGEST_BLOCK = 2**15 - 1  # columns are numbered in int16
RESERVED_SHARE = 32  # one channel in so many may be an outlier, unless a capacity is given
LEAST_SHARE = 256  # one column for so many channels is reserved where no outlier was seen


@dataclass(frozen=True)
class OutlierState(State):
    """Which channels of a tensor are outliers.

    Attributes:
        num_channels: channels of the tensor.
        channels: the outlier channels, ascending; column k of an outlier block belongs to channels[k].
        left_out: outlier channels found beyond the block's capacity, highest first. They stay in the groups.
        columns: int64 [len(channels)], the same list on the device.
        slots: int16 [num_channels] on the device, a channel's column, or -1.
    """

    num_channels: int
    channels: tuple[int, ...]
    left_out: tuple[int, ...]
    columns: Tensor
    slots: Tensor

    @staticmethod
    def from_channels(
        channels: Sequence[int], num_channels: int, device: torch.device | str, *, left_out: Sequence[int] = ()
    ) -> "OutlierState":
        """The state for a list of outlier channels.

        Raises:
            UserError: a channel outside 0 .. num_channels - 1, given twice, or more than 32767 of them.
        """
        ordered = tuple(sorted(channels))
        inside = not ordered or (ordered[0] >= 0 and ordered[-1] < num_channels)
        if not inside or len(set(ordered)) != len(ordered) or len(ordered) > LARGEST_BLOCK:
            raise UserError(
                f"Outlier channels {ordered} do not fit {num_channels} channels; each has to be named once and "
                f"lie between 0 and {num_channels - 1}, and there may be {LARGEST_BLOCK} at most."
            )
        columns = torch.tensor(ordered, dtype=torch.int64)
        slots = torch.full((num_channels,), -1, dtype=torch.int16)
        slots[columns] = torch.arange(len(ordered), dtype=torch.int16)
        return OutlierState(num_channels, ordered, tuple(left_out), columns.to(device), slots.to(device))


class ChannelStatistics:
    """Accumulates sum |x| of each channel over any number of tensors.

    Attributes:
        sums: float32 [num_channels] on the device. May be reduced over ranks in place.
    """

    def __init__(
        self,
        num_channels: int,
        device: torch.device | str,
        *,
        channel_dim: int = -1,
        implementation: Implementation = Implementation.AUTO,
    ) -> None:
        self.channel_dim = channel_dim
        self.implementation = implementation
        self.sums = torch.zeros(num_channels, dtype=torch.float32, device=device)

    def update(self, x: Tensor) -> None:
        """Add the channels of `x`, any float dtype, shape and strides. Does not wait for the device.

        Raises:
            UserError: x has another number of channels.
        """
        with torch.no_grad():
            layout, run = Layout.of(x.detach(), self.channel_dim)
            if layout.channels != self.sums.numel():
                raise UserError(
                    f"Statistics of {self.sums.numel()} channels got a tensor of shape {layout.shape}, whose "
                    f"dimension {self.channel_dim} has {layout.channels}."
                )
            if not run.numel():
                return
            matrix = run.view(-1, layout.channels)
            implementation = self.implementation.resolve(run.device)
            if implementation.is_kernel:
                kernel = load_kernel("statistics", interpret=implementation is Implementation.INTERPRET)
                self.sums += kernel.partial_sums(matrix).sum(0)
            else:
                self.sums += channel_sums(matrix)

    def z_scores(self) -> Tensor:
        """float32 [num_channels]; all zero where the channels do not differ."""
        if not self.sums.numel():
            return self.sums
        deviation = self.sums.std(unbiased=False)
        return torch.where(deviation > 0, (self.sums - self.sums.mean()) / deviation, 0.0)

    def outliers(self, threshold: float = 3.0, capacity: int | None = None) -> OutlierState:
        """The outlier channels, at most `capacity` of them, those of highest z. Waits for the device.

        Args:
            threshold: of z; 3 for language models, 2.5 is advised for vision.
            capacity: columns of the reserved block; one channel in 32, and at least one, where not given.
        """
        num_channels = self.sums.numel()
        capacity = most_columns(num_channels) if capacity is None else capacity
        scores = self.z_scores().tolist()
        found = [channel for channel in range(num_channels) if scores[channel] > threshold]
        found.sort(key=lambda channel: (-scores[channel], channel))
        if len(found) > capacity:
            logger.warning(
                "%d of %d channels are outliers (z > %g), but the reserved block holds %d: the highest stay in "
                "it, the others are quantized with their groups.",
                len(found), num_channels, threshold, capacity,
            )  # fmt: skip
        return OutlierState.from_channels(found[:capacity], num_channels, self.sums.device, left_out=found[capacity:])

    def highest(self, count: int, threshold: float = 3.0) -> OutlierState:
        """The `count` channels of highest z, outliers or not. Waits for the device.

        Outliers beyond `count` are named as left out."""
        scores = self.z_scores().tolist()
        ordered = sorted(range(len(scores)), key=lambda channel: (-scores[channel], channel))
        left_out = [channel for channel in ordered[count:] if scores[channel] > threshold]
        return OutlierState.from_channels(ordered[:count], len(scores), self.sums.device, left_out=left_out)


def most_columns(num_channels: int) -> int:
    """The largest outlier block that is made for a tensor of so many channels: one in 32, and at least one."""
    return max(1, num_channels // RESERVED_SHARE)


def reserved_columns(num_channels: int, found: int) -> int:
    """Columns of an outlier block for tensors of which one had `found` outlier channels.

    That many; at least one for 256 channels, since other layers and later steps may have outliers where this
    tensor has none; at most one for 32, or four where that is more."""
    least = max(1, num_channels // LEAST_SHARE)
    return min(num_channels, max(least, min(found, max(4, most_columns(num_channels)))))


def channel_sums(matrix: Tensor) -> Tensor:
    """Reference: float [rows, channels] -> float32 [channels], sum |x| over the finite elements."""
    magnitude = matrix.to(torch.float32).abs()
    return torch.where(magnitude < torch.inf, magnitude, 0.0).sum(0)
