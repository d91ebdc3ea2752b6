"""Run the forward and backward of a step again: put back what Megatron's have changed.

Gradient buffers, the position in the data, timers that an exception left running, Megatron's tracker of random states.
Not put back are statistics that a mixture of experts only logs.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from megatron_adacc.adaptive.retry import Retry


class Rewindable:
    """A data iterator whose items since its making can be read again."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._read: list[Any] = []
        self._position = 0

    def __iter__(self) -> "Rewindable":
        return self

    def __next__(self) -> Any:
        if self._position == len(self._read):
            self._read.append(next(self._iterator))
        self._position += 1
        return copy.copy(self._read[self._position - 1])  # the reader may take entries out of it

    def rewind(self) -> None:
        """Begin again with the first item that was read here."""
        self._position = 0


class TrackerStates:
    """The states of Megatron's tracker of random states as they are now."""

    def __init__(self) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self._tracker = get_cuda_rng_tracker()
        self._states = self._tracker.get_states()
        # With CUDA graphs the states are generators, which draws move; else tensors, which draws replace.
        self._moved = {n: s.get_state() for n, s in self._states.items() if isinstance(s, torch.Generator)}

    def put_back(self) -> None:
        self._tracker.set_states(self._states)
        for name, state in self._moved.items():
            self._states[name].set_state(state)


def retried(forward_backward: Callable, retry: Retry, model: list, optimizer: Any) -> Callable:
    """Megatron's forward_backward_func, run again under a tighter plan where it did not get its memory."""

    def run(*, data_iterator: Any, **kwargs: Any) -> Any:
        several = isinstance(data_iterator, list)
        given = data_iterator if several else [data_iterator]
        iterators = [None if one is None else Rewindable(one) for one in given]
        tracker = TrackerStates()
        running = _running_timers()

        def attempt() -> Any:
            return forward_backward(data_iterator=iterators if several else iterators[0], **kwargs)

        def undo() -> None:
            for chunk in model:
                _drop_gradients(chunk)
            optimizer.zero_grad()
            for iterator in iterators:
                if iterator is not None:
                    iterator.rewind()
            tracker.put_back()
            for timer in _running_timers():
                if timer not in running:
                    timer._started = False
            _forget_validations()

        return retry.run(attempt, undo)

    return run


def _drop_gradients(chunk: Any) -> None:
    """As at the beginning of a step, also where a backward was left in its middle."""
    groups = [*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())]
    for group in groups:
        handle = getattr(group, "grad_reduce_handle", None)
        if handle is not None:
            handle.wait()
            group.grad_reduce_handle = None
        if getattr(group, "is_first_batch", False):
            group.per_param_grad_ready_counts = {}  # counted in a part of a backward only
    for parameter in chunk.parameters():
        parameter.grad = None
    chunk.zero_grad_buffer()


def _running_timers() -> list[Any]:
    from megatron.training import get_timers

    return [timer for timer in getattr(get_timers(), "_timers", {}).values() if getattr(timer, "_started", False)]


def _forget_validations() -> None:
    """Megatron counts the results that a step has validated, to find each again when it runs a step twice."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    get_rerun_state_machine().validation_counts.clear()
