"""Two ranks under "auto": one plan for both, whatever their clocks say; other layers on one of them are refused."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.measured import MeasuredPrices
from megatron_adacc.cost.stage_plan import Room, plan_stage
from megatron_adacc.errors import UserError
from megatron_adacc.graph import LayerGraph
from megatron_adacc.runtime.setting import Setting

pytestmark = pytest.mark.distributed


class Layer(nn.Module):
    """[32, 64] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh().exp().sigmoid())


class Crooked(MeasuredPrices):
    """A clock that finds early ops cheap and late ones dear, or the other way about."""

    steep = 1.0

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        us = super().op_us(graph, op)
        return None if us is None else 10.0 * self.steep**op


def worker(rank: int, folder: str, widths: tuple[int, int]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    import megatron_adacc.runtime.auto as auto

    Crooked.steep = (4.0, 0.25)[rank]
    auto.MeasuredPrices = Crooked  # type: ignore[misc]
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer(widths[rank]) for _ in range(2))
    world = dist.group.WORLD
    assert world is not None
    setting = Setting(Limit.parse("70%"), lambda device: Room(), groups=[world])
    handle = attach(layers, "auto", setting=setting)
    try:
        for seed in range(3):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            y = x
            for layer in layers:
                y = layer(y)
            y.sum().backward()
        assert handle.stage is not None
        text = handle.plan.to_json()
        alone = plan_stage(handle.stage.facts, setting.limit or Limit(), Room())
        other = str(sorted(map(str, alone.plan.layers)) == sorted(map(str, handle.stage.plan.layers)))
    except UserError as error:
        text, other = str(error), ""
    Path(folder, f"rank{rank}").write_text(text)
    Path(folder, f"alone{rank}").write_text(other)
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, widths: tuple[int, int]) -> list[str]:
    mp.spawn(worker, args=(str(folder), widths), nprocs=2)
    return [(folder / f"rank{rank}").read_text() for rank in range(2)]


def test_both_hold_the_plan_of_the_first(tmp_path: Path) -> None:
    first, second = run(tmp_path, (128, 128))
    assert first == second
    assert "recompute" in first
    # The second rank's own clock would have given another.
    assert [(tmp_path / f"alone{rank}").read_text() for rank in range(2)] == ["True", "False"]


def test_other_layers_on_one_rank_are_named(tmp_path: Path) -> None:
    first, second = run(tmp_path, (128, 136))
    assert first == second
    assert first.startswith("Rank 1 has other layers than rank 0")
    assert "16384 bytes" in first
    assert "17408 bytes" in first
