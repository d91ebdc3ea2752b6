"""The deferred check that what the plan stores as bits was two-valued, without a wait in training.

On CUDA, bitmask's encode sets a flag on the device for a tensor with a third value, and that tensor decodes to
NaN. The flag is never cleared, so it may be read late: each poll reads what the poll before it had copied to the
host, and starts the next copy.
"""

from __future__ import annotations

import torch

from megatron_adacc.codecs.bitmask import BitmaskState


class MaskCheck:
    """The flag of one device. ``poll()`` at every step, ``close()`` at the end: nothing is missed between them.

    Attributes:
        state: what bitmask's encode gets.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = BitmaskState.on(device)
        self._copied = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def poll(self) -> None:
        """Raise NotTwoValuedError for what an earlier poll has copied; does not wait for the device."""
        if int(self._copied.item()):
            self.state.raise_if_violated()
        self._copied.copy_(self.state.violations, non_blocking=True)

    def close(self) -> None:
        """Wait for the device, and raise NotTwoValuedError for anything that was found."""
        self.state.raise_if_violated()
