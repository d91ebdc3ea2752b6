"""placeholder"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OuterShape:
    sequence: int = 1
    micro_batch: int = 1
