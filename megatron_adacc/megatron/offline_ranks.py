"""One rank of a job whose other ranks do not exist: Megatron's process groups over torch's fake back end.

A collective of that back end returns at once and leaves its tensors as they are, which is all that fake tensors need.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from megatron_adacc.errors import UserError


class NoRandomStates:
    """In place of Megatron's tracker of CUDA generators: nothing is drawn, so nothing is forked."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None: ...

    def add(self, name: str, seed: int) -> None: ...

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


@contextlib.contextmanager
def _globals_of(*modules: ModuleType) -> Iterator[None]:
    """Put the modules' global variables back afterwards."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, names in zip(modules, before, strict=True):
            table = vars(module)
            for name in set(table) - set(names):
                del table[name]
            table.update(names)


@contextlib.contextmanager
def lone_rank(args: Namespace, world_size: int, rank: int) -> Iterator[None]:
    """Be this rank of the job that `args` describes.

    Raises UserError where this process belongs to a job already."""
    from megatron.core import parallel_state, utils
    from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise UserError("Offline planning runs in a process of its own, and this one belongs to a job already.")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_globals_of(parallel_state, random, utils))
        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        stack.callback(torch.distributed.destroy_process_group)
        stack.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            create_gloo_process_groups=False,
        )
        random._CUDA_RNG_STATE_TRACKER = NoRandomStates()
        random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
        # Their caches would hold the model, and give fake angles to a later one.
        for owner in (rotary_pos_embedding, yarn_rotary_pos_embedding):
            for cached in _caches(owner):
                cached.cache_clear()
                stack.callback(cached.cache_clear)
        yield


def _caches(module: ModuleType) -> list[Any]:
    tables = [vars(module), *(vars(kind) for kind in vars(module).values() if isinstance(kind, type))]
    return [value for table in tables for value in table.values() if hasattr(value, "cache_clear")]
