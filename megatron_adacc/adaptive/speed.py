"""Steps that take longer than before: which op or collective is slower than it was timed at start-up.

Between checks only the time from step to step is kept. Where its median over the last steps is far above the best so
far, a layer of each class is rehearsed in the next step with a clock around each op, and the sums by kind of op are
compared with the prices that the plan was made from.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_adacc.graph.model import LayerGraph
from megatron_adacc.runtime.attach import Handle
from megatron_adacc.runtime.traces import LookedAt

STEPS = 4  # over which a median is taken
SLOW = 1.2  # times the best median
SLOWER = 1.5  # times an op's price
SHARE = 0.05  # of the layer's forward that an op has to have lost, to be named

Price = Callable[[LayerGraph, int], float | None]


class StepClock:
    """The time from the end of a step to the end of the next."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._seconds: list[float] = []
        self._best: float | None = None

    def ended(self) -> None:
        """A step has ended."""
        now = self._clock()
        if self._ended is not None:
            self._seconds = [*self._seconds[1 - STEPS :], now - self._ended]
            if len(self._seconds) == STEPS:
                median = statistics.median(self._seconds)
                self._best = median if self._best is None else min(self._best, median)
        self._ended = now

    def begin_again(self) -> None:
        """Another plan: what was before is no measure of it."""
        self._ended, self._seconds, self._best = None, [], None

    @property
    def times(self) -> float:
        """How many times the best median the last one is; 1 while too few steps were seen."""
        if self._best is None or len(self._seconds) < STEPS:
            return 1.0
        return statistics.median(self._seconds) / self._best


class SpeedCheck:
    """``price``: microseconds of an op of a graph as they were timed, None where it was not. ``preserve``: as for
    GradientCheck. Ranks whose layers exchange tensors look in the same steps."""

    def __init__(self, handle: Handle, price: Price, preserve: Callable[[], AbstractContextManager[None]]) -> None:
        self._handle = handle
        self._price = price
        self._preserve = preserve
        self._looked: set[int] = set()
        self.lines: list[str] = []

    def arm(self) -> None:
        """Look at the next forward of one layer of each class."""
        self._looked, self.lines = set(), []
        for cache in self._handle.caches:
            cache.look = self._look

    def disarm(self) -> None:
        for cache in self._handle.caches:
            cache.look = None

    def _look(self, call: LookedAt) -> None:
        if id(call.program.graph) in self._looked or not call.module.training:
            return
        self._looked.add(id(call.program.graph))
        with self._preserve(), call.rehearsal.begin() as rehearsed:
            clocks = [OpClock(call.program.context.device) for _ in range(2)]
            for clock in clocks:  # the first run warms up
                with clock:
                    rehearsed.forward(Tensor.detach, lambda tensor: tensor)
        self.lines += slower_ops(call.program.graph, clocks[-1].us, self._price)


class OpClock(TorchDispatchMode):
    """Microseconds of the ops that run inside, by name. Waits for the device around each."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.us: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._wait()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._wait()
        self.us[str(func)] += (time.perf_counter() - start) * 1e6  # type: ignore[assignment]
        return result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def slower_ops(graph: LayerGraph, measured_us: Counter[str], price: Price) -> list[str]:
    """Kinds of op that take far longer than they were timed, and lose a share of the layer's forward by it."""
    timed: Counter[str] = Counter()
    for op in graph.ops:
        us = price(graph, op.index)
        if us is not None:
            timed[op.target] += us  # type: ignore[assignment]
    whole = sum(timed.values())
    found = []
    for target, us in sorted(timed.items(), key=lambda item: item[1] - measured_us[item[0]]):
        lost = measured_us[target] - us
        if us and measured_us[target] > SLOWER * us and lost > SHARE * whole:
            found.append(
                f"{target} in {graph.module} takes {measured_us[target] / us:.1f} times as long as it was timed "
                f"({measured_us[target] / 1e3:.2f} ms a layer instead of {us / 1e3:.2f})"
            )
    return found
