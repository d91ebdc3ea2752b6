"""Microseconds and errors as whole numbers, so that their sums are exact."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal


@dataclass(frozen=True)
class Grid:
    """Values as whole numbers of 10**-digits units, rounded to the nearest, or up."""

    digits: int
    round_up: bool = False

    @staticmethod
    def fitting(values: list[float], largest_sum: float, most_units: int, round_up: bool = False) -> Grid:
        """The coarsest grid on which all values are exact, if ``largest_sum`` is at most ``most_units`` of its units;
        otherwise the finest of which that holds."""
        exponents = (int(Decimal(repr(float(v))).normalize().as_tuple().exponent) for v in values if v)
        digits = max((-exponent for exponent in exponents), default=0)
        while Decimal(largest_sum).scaleb(digits) > most_units:
            digits -= 1
        return Grid(digits, round_up)

    def units(self, value: float) -> int:
        return self._integer(value, ROUND_CEILING if self.round_up else ROUND_HALF_EVEN)

    def floor(self, value: float) -> int:
        """The most whole units that are not above the value."""
        return self._integer(value, ROUND_FLOOR)

    def value(self, units: int) -> float:
        return float(Decimal(units).scaleb(-self.digits))

    def _integer(self, value: float, rounding: str) -> int:
        # repr gives the shortest decimal that is this float: what the user wrote.
        return int(Decimal(repr(float(value))).scaleb(self.digits).to_integral_value(rounding))
