"""Compare each layer's gradients under the plan with exact ones, in the first micro-batch of a step.

Before a layer's forward of that step, its call is rehearsed twice beside the training, exactly and as the plan holds
it, with the same random gradient of its outputs. What comes out is the error of this layer alone; errors of layers
above do not enter. A layer under a lossless plan is exact by construction and not rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from megatron_adacc.cost.errors import Comparison
from megatron_adacc.runtime.attach import Handle
from megatron_adacc.runtime.plan_error import compare_with_exact
from megatron_adacc.runtime.traces import LookedAt


class GradientCheck:
    """``preserve``: a context that puts back what a forward changes beside torch's default generators.

    Needs the memory of one layer's activations and two sets of its gradients beside what the step needs. Ranks whose
    layers exchange tensors look in the same steps."""

    def __init__(self, handle: Handle, preserve: Callable[[], AbstractContextManager[None]]) -> None:
        self._handle = handle
        self._preserve = preserve
        self.found: dict[int, Comparison] = {}  # by place

    def arm(self) -> None:
        """Look at the next forward of each layer."""
        self.found = {}
        for cache in self._handle.caches:
            cache.look = self._look

    def disarm(self) -> None:
        for cache in self._handle.caches:
            cache.look = None

    def _look(self, call: LookedAt) -> None:
        if call.place in self.found or not call.module.training:
            return
        with self._preserve():
            self.found[call.place] = compare_with_exact(call.program, call.module, call.rehearsal)
