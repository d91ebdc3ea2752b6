"""Counts of held bytes to compare the meter with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_adacc.runtime.held import HeldBytes, HeldMeter


@pytest.fixture
def hooked_bytes() -> Callable[[Callable[[], Any], nn.Module], int]:
    """`hooked_bytes(forward, model)`: bytes of the distinct storages that autograd packs in a forward.

    Parameters and buffers of `model` are not counted: this is `HeldBytes.total_bytes`, found in another
    way, while the forward runs.
    """

    def count(forward: Callable[[], Any], model: nn.Module) -> int:
        packed: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            packed[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        total = sum(storage.nbytes() for identity, storage in packed.items() if identity not in own)
        del outputs
        return total

    return count


@pytest.fixture
def held() -> Callable[..., HeldBytes]:
    """`held(forward, model, **layers)`: the meter's figure for one forward; its parts add up."""

    def measure(forward: Callable[[], Any], model: nn.Module, **layers: nn.Module) -> HeldBytes:
        with HeldMeter(layers, model) as meter:
            result = meter.measure(forward())
        assert result.total_bytes == sum(result.layer_bytes.values()) + result.outside_bytes
        assert list(result.layer_bytes) == list(layers)
        return result

    return measure


@pytest.fixture
def node_kinds() -> Callable[[torch.Tensor], set[str]]:
    """`node_kinds(output)`: the type names of the nodes behind a tensor."""

    def walk(output: torch.Tensor) -> set[str]:
        pending, seen = [output.grad_fn], []
        while pending:
            node = pending.pop()
            if node is not None and node not in seen:
                seen.append(node)
                pending.extend(successor for successor, _ in node.next_functions)
        return {type(node).__name__ for node in seen}

    return walk
