"""One strategy of `adacc bench` in a process of its own, which does what it is told on its standard input.

Every line in is a request, every line out an answer, both JSON; see :class:`Worker` for what can be asked. What
Megatron prints goes to standard error. A request that fails is answered with the error, and the process goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROGRAM = "adacc bench"
FORWARD_ENDED = "adacc bench: forward ended"
WARM_UP = 3  # steps: two that are traced, and one in which whatever is left compiles


class Worker:
    """A model of Megatron's under one strategy (bench_strategies.py). ``flags``: Megatron's."""

    def __init__(self, strategy: str, flags: list[str], threads: int, plan: str | None) -> None:
        from megatron_adacc.megatron import launch

        launch.prepare(PROGRAM, flags)
        sys.argv = [PROGRAM, *flags]
        import torch
        from megatron.core.tensor_parallel import random

        from megatron_adacc.megatron import bench_strategies, one_rank

        if not torch.cuda.is_available():
            torch.set_num_threads(threads)
        self._strategy = bench_strategies.get(strategy, plan)
        self._args = one_rank.start(self._strategy.megatron_plan)
        self._model, self._layers = one_rank.build(self._args)
        self._forward = one_rank.forward
        self._handle = self._strategy.apply(self._layers)
        self._tracker = random.get_cuda_rng_tracker()
        self._states = self._tracker.get_states()
        self._device = next(self._model.parameters()).device

    def _begin(self) -> None:
        """The same tokens and the same dropout masks in every step."""
        import torch

        self._model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        self._tracker.set_states(dict(self._states))  # it changes the dictionary that it is given

    def _loss(self) -> Tensor:
        loss: Tensor = self._forward(self._model, self._args).float().mean()
        return loss

    def step(self) -> dict[str, float]:
        """A forward and backward: seconds of the CPU and of the clock, and the loss."""
        self._begin()
        self._wait()
        cpu, wall = time.process_time(), time.perf_counter()
        loss = self._loss()
        loss.backward()
        self._wait()
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "loss": float(loss.detach())}

    def _wait(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def warm_up(self) -> dict[str, float]:
        """The steps before the first that counts: seconds that they took beyond the last of them."""
        times = [self.step()["wall"] for _ in range(WARM_UP)]
        return {"first": sum(times) - WARM_UP * times[-1]}

    def memory(self) -> dict[str, int]:
        """Bytes that a forward leaves behind for its backward, and the largest sum of live bytes of the step, above
        what was live before it."""
        self._begin()
        held, peak = (self._cuda_memory if self._device.type == "cuda" else self._cpu_memory)()
        return {"held": held, "peak": peak}

    def _cuda_memory(self) -> tuple[int, int]:
        import torch

        self._wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = self._loss()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        return held, torch.cuda.max_memory_allocated() - before

    def _cpu_memory(self) -> tuple[int, int]:
        """Counted from the allocations that torch's profiler reports."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            loss = self._loss()
            with torch.profiler.record_function(FORWARD_ENDED):
                pass
            loss.backward()
        assert profile.profiler is not None
        results = profile.profiler.kineto_results
        assert results is not None
        live = highest = held = 0
        events = [event for event in results.events() if event.name() in ("[memory]", FORWARD_ENDED)]
        for event in sorted(events, key=lambda e: e.start_ns()):
            if event.name() == FORWARD_ENDED:
                held = live
            else:
                live += event.nbytes()
                highest = max(highest, live)
        return held, highest

    def save_gradients(self, path: str) -> dict[str, float]:
        """Run a step and write its gradients."""
        import torch

        self.step()
        torch.save(self._gradients(), path)
        return {}

    def compare_gradients(self, path: str) -> dict[str, float]:
        """Run a step: the largest |g' - g| / |g| of a parameter against those written; 0 where all bits are equal."""
        import torch

        self.step()
        exact = torch.load(path, weights_only=True)
        largest = 0.0
        for name, gradient in self._gradients().items():
            other = exact[name]
            if not torch.equal(gradient, other):
                norm = float(other.float().norm())
                largest = max(largest, float((gradient.float() - other.float()).norm()) / (norm or 1.0))
        return {"error": largest}

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {n: p.grad.cpu() for n, p in self._model.named_parameters() if p.grad is not None}

    def plans(self, limits: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Of the strategy "learn" only: the plans for these limits; see bench_plans.py."""
        from megatron_adacc.megatron.bench_plans import answer

        assert self._handle is not None
        stage = self._handle.stage
        assert stage is not None
        return answer(stage, limits)


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            what = request.pop("do")
            if what == "start":
                worker = Worker(**request)
                result: dict[str, Any] = {}
            else:
                method: Callable[..., dict[str, Any]] = getattr(worker, what)
                result = method(**request)
        except Exception as error:  # whatever a strategy stumbles over is its row's note
            result = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(result) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
