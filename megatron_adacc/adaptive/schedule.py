"""When the monitor looks: often after a change, ever more rarely while nothing changes.

    the first check is at step min_interval; after a check at step s
    next check <- s + interval,      interval <- min(2 * interval, max_interval)     where nothing changed
    next check <- s + min_interval,  interval <- min_interval                        where something did

A change that is found between checks does the same as one that a check finds. From 1
with a largest interval of 64 and no change: steps 1, 2, 4, 8, 16, 32, 64, 128, 192, 256.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_adacc.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """A value: :meth:`after` gives the next one. Steps are numbered from 1.

    ``interval``: steps from ``next_check`` to the check after it, if nothing changes."""

    min_interval: int
    max_interval: int
    interval: int
    next_check: int

    @staticmethod
    def start(min_interval: int, max_interval: int) -> Schedule:
        """Before the first step. Raises UserError unless 1 <= min_interval <= max_interval."""
        if not 1 <= min_interval <= max_interval:
            raise UserError(
                f"min_interval {min_interval} and max_interval {max_interval} have to be at least 1, and the first at "
                "most the second."
            )
        return Schedule(min_interval, max_interval, min_interval, min_interval)

    def due(self, step: int) -> bool:
        """Whether this step is to be checked; a check that was missed stays due."""
        return step >= self.next_check

    def after(self, step: int, changed: bool) -> Schedule:
        """The schedule once step ``step`` has ended: after its check, or after a change that was found without one."""
        if changed:
            return replace(self, interval=self.min_interval, next_check=step + self.min_interval)
        if not self.due(step):
            return self
        return replace(self, interval=min(2 * self.interval, self.max_interval), next_check=step + self.interval)

    def to_data(self) -> dict[str, int]:
        """Its state as builtins, for a checkpoint."""
        return {"interval": self.interval, "next_check": self.next_check}

    def from_data(self, state: Mapping[str, Any]) -> Schedule:
        """This schedule at the state of :meth:`to_data`; an interval outside this schedule's range is brought into it.

        Raises UserError when it is no such state."""
        try:
            interval, next_check = int(state["interval"]), int(state["next_check"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"The state of a schedule has the numbers interval and next_check; this one is {state!r}."
            ) from error
        interval = max(self.min_interval, min(interval, self.max_interval))
        return replace(self, interval=interval, next_check=next_check)
