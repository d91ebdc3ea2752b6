"""Memory limits as people write them: 30GiB, 512MB, 25%."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_adacc.errors import UserError

_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[a-zA-Z]+)\s*")


@dataclass(frozen=True)
class Limit:
    """``total_bytes``: of the whole device. ``share``: of the activation bytes that the plain run holds for its
    backward. Exactly one is given."""

    total_bytes: int | None = None
    share: Fraction | None = None

    @staticmethod
    def parse(text: str) -> Limit:
        """The limit that ``text`` says. Raises UserError where it says none, and where the unit is missing."""
        match = _WRITTEN.fullmatch(text) if isinstance(text, str) and text.isascii() else None
        if match is None:
            hint = " a unit is missing;" if re.fullmatch(r"\s*[0-9.]+\s*", str(text)) else ""
            raise UserError(
                f"The limit {text!r} cannot be read:{hint} give bytes with a unit, such as 30GiB or 512MB, or a "
                "share of the plain run's activations, such as 25%."
            )
        number, unit = Fraction(match.group(1)), match.group(2)
        if unit == "%":
            if not 0 <= number <= 100:
                raise UserError(f"The limit {text!r} must lie between 0% and 100% of the plain run's activations.")
            return Limit(share=number / 100)
        factor = _UNITS.get(unit.upper())
        if factor is None:
            raise UserError(f"The limit {text!r} has an unknown unit: use B, KB, MB, GB, TB, KiB, MiB, GiB, TiB or %.")
        return Limit(total_bytes=int(number * factor))

    def to_data(self) -> list[int | None]:
        """As builtins: total bytes, and numerator and denominator of the share."""
        share = self.share
        return [self.total_bytes, *((None, None) if share is None else (share.numerator, share.denominator))]

    @staticmethod
    def from_data(data: Sequence[int | None]) -> Limit:
        """The limit of :meth:`to_data`. Raises ValueError when it is none."""
        total, numerator, denominator = data
        share = None if numerator is None else Fraction(numerator, denominator)
        if (total is None) == (share is None):
            raise ValueError(f"a limit is bytes or a share, not {data!r}")
        return Limit(total, share)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{float(100 * self.share):.4g} % of the plain activations"
        assert self.total_bytes is not None
        return written_bytes(self.total_bytes)


def written_bytes(nbytes: int) -> str:
    """Bytes for people: 913.1 MiB, rounded; below one KiB exactly."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def least_written(nbytes: int) -> str:
    """Bytes as a limit that is not below them, rounded up to a tenth of their unit."""
    for unit in ("GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit.upper()]:
            tenths = -(-10 * nbytes // _UNITS[unit.upper()])
            return f"{tenths // 10}.{tenths % 10}{unit}"
    return f"{nbytes}B"
