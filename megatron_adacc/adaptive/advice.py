"""What a person may want to change: each is said once, at a check that shows it.

seen                                                   advice
the loss varies more than before, checks are far apart  lower max_interval
steps take longer than before (adaptive/speed.py)       the op or collective that is slower than it was timed
a peak above its prediction (adaptive/controller.py)    by how much; beyond the limit the plan is solved again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_adacc.adaptive.controller import AdaptiveHandle

VOLATILE = 2.0  # times the former variation of the loss


class Advice:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def on(self, handle: AdaptiveHandle) -> list[str]:
        """What is new now."""
        found = {"volatile": self._volatile(handle)}
        new = {topic: line for topic, line in found.items() if line is not None and topic not in self._said}
        self._said.update(new)
        return list(new.values())

    @staticmethod
    def _volatile(handle: AdaptiveHandle) -> str | None:
        """Late in training with a long interval."""
        config, schedule = handle.config, handle.schedule
        times = handle.loss_watch.volatility()
        long = schedule.interval == config.max_interval > config.min_interval
        if times < VOLATILE or not long or handle.attached.plan.lossless:
            return None
        return (
            f"Step {handle.steps}: the loss varies {times:.1f} times as much as before, and the plan is checked every "
            f"{schedule.interval} steps only; lower max_interval (--adacc-max-interval)."
        )
