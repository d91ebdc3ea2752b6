"""Parameters that hooks bring up to date inside a layer's forward, in some calls and not in others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.graph import Origin, fingerprint, trace


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    """Its parameters are parts of one tensor, gathered before ``down`` runs, as Megatron does with
    --overlap-param-gather: [4, 8] -> the same."""

    def __init__(self, gathers: bool, own_shard: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        parameters = list(self.parameters())
        whole = torch.cat([p.detach().flatten() for p in parameters])
        for p, part in zip(parameters, whole.split([p.numel() for p in parameters]), strict=True):
            p.data = part.view(p.shape)

        shard = whole.clone() if own_shard else whole[:]

        def gather(*_: Any) -> None:
            if self.gathers[0]:
                dist.all_gather_into_tensor(whole, shard)
                assert all(p.data.is_contiguous() for p in reversed(parameters))  # in an order of its own

        self.gathers = [gathers]
        self.down.register_forward_pre_hook(gather)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).exp()


@pytest.mark.parametrize("own_shard", [False, True])
def test_a_gather_is_no_part_of_the_layer(own_shard: bool) -> None:
    graphs = [trace(Layer(gathers, own_shard), torch.randn(4, 8, requires_grad=True)) for gathers in (False, True)]
    assert fingerprint(graphs[0]) == fingerprint(graphs[1])
    assert not any(op.collective for op in graphs[1].ops)
    names = {b.name for b in graphs[1].buffers if b.origin == Origin.PARAMETER}
    assert names == {"up.weight", "up.bias", "down.weight", "down.bias"}


def test_a_gather_of_what_the_call_computed_is_a_part_of_it() -> None:
    class Gathered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.detach().tanh()
            whole = torch.empty_like(y)
            dist.all_gather_into_tensor(whole, y)
            return x * whole

    class Overwritten(nn.Module):
        """Writes what it was given to its own parameter, as no gather does."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            dist.all_gather_into_tensor(self.weight.data, x.detach())
            return x * self.weight

    for module in (Gathered(), Overwritten()):
        assert [op.collective for op in trace(module, torch.randn(4, 8, requires_grad=True)).ops].count(True) == 1


def test_the_plan_holds_whether_a_call_gathers_or_not() -> None:
    layer = Layer(False)
    with attach(layer, "recompute", min_bytes=0) as handle:
        found = []
        for call in range(6):
            layer.gathers[0] = call % 2 == 1
            layer.zero_grad()
            y = layer(torch.ones(4, 8, requires_grad=True))
            assert call == 0 or handle.stored_bytes() == 4 * 8 * 4  # the input alone
            y.sum().backward()
            found.append([p.grad for p in layer.parameters() if p.grad is not None])
        assert handle.traced_forwards == 2
    for gradients in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0], strict=True))
