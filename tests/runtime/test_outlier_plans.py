"""Outlier channels under plan "compress": columns that the plan reserves, channels that each layer has of its own."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc import attach
from megatron_adacc.codecs import OutlierState
from megatron_adacc.cost.errors import gradient_errors
from megatron_adacc.cost.layer_problem import offer
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.graph import Role
from megatron_adacc.planner import Compress, Keep, LayerPlan, Plan, Recompute
from megatron_adacc.runtime.attach import Handle
from megatron_adacc.runtime.plan_error import plan_error
from megatron_adacc.runtime.program import Program

HIDDEN = 128


class Mlp(nn.Module):
    """Pre-norm MLP with dropout, [rows, 128] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def stack(planted: tuple[tuple[int, ...], ...]) -> nn.ModuleList:
    """One layer for each tuple of channels, whose norm weights are 20 times as large as the others."""
    torch.manual_seed(4)
    layers = nn.ModuleList(Mlp() for _ in planted)
    with torch.no_grad():
        for layer, channels in zip(layers, planted, strict=True):
            layer.norm.weight[list(channels)] = 20.0
            layer.up.weight[:, list(channels)] /= 20.0
    return layers


def loss_of(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def programs(handle: Handle) -> list[Program]:
    """The settled program of each attached layer."""
    return [f.cache.program(f.cache.traces()[-1], f.layer) for f in handle._forwards]


def held_bytes(program: Program) -> int:
    """What the plan says that one layer holds."""
    graph, total = program.graph, 0
    for buffer in graph.saved:
        match program.action(buffer):
            case Keep():
                total += graph.buffers[buffer].nbytes
            case Compress():
                total += program.packed_bytes(buffer)
    return total


def columns(plan: Plan) -> dict[str, int]:
    return {
        site: dict(action.options)["columns"]
        for layer in plan.layers
        for site, action in layer.actions
        if isinstance(action, Compress) and action.codec.startswith("outlier")
    }


def _without_columns(layer: LayerPlan) -> LayerPlan:
    actions = ((s, replace(a, options=()) if isinstance(a, Compress) else a) for s, a in layer.actions)
    return replace(layer, actions=tuple(actions))


def errors_of(layers: nn.ModuleList, plan: str | Plan, x: Tensor) -> dict[str, float]:
    """Relative gradient errors by parameter."""
    attached = copy.deepcopy(layers)
    with attach(attached, plan) as handle:
        for _ in range(3):
            errors = handle.gradient_errors(lambda: loss_of(attached, x))
    return errors


PLANTED = ((3, 70, 101), (5, 64, 127), (0, 1, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(256, HIDDEN, generator=torch.Generator().manual_seed(0), requires_grad=True)


def test_planted_channels_cost_less_with_separation_than_without_and_than_quantize(x: Tensor) -> None:
    layers = stack(PLANTED)
    attached = copy.deepcopy(layers)
    with attach(attached, "compress") as handle:
        for _ in range(2):
            loss_of(attached, x).backward()
        separated = handle.plan
    without = replace(separated, layers=tuple(_without_columns(layer) for layer in separated.layers))
    found = {
        name: errors_of(layers, plan, x)
        for name, plan in (("separated", separated), ("without", without), ("quantize", "quantize"))
    }
    for place in range(3):
        with_columns, no_columns, quantized = (found[name][f"{place}.up.weight"] for name in found)
        assert with_columns < 0.5 * no_columns, place
        assert with_columns < 0.5 * quantized, place
    assert max(found["separated"].values()) < 0.5 * max(found["without"].values())
    assert max(found["separated"].values()) < 0.5 * max(found["quantize"].values())


def outliers_of(handle: Handle, layer: nn.Module) -> dict[str, OutlierState]:
    return {key.site: state for key, state in handle.states.outliers(layer)}


def test_each_layer_has_its_own_channels_and_all_hold_the_predicted_bytes(x: Tensor) -> None:
    layers = stack(PLANTED)
    with attach(layers, "compress") as handle:
        for _ in range(3):
            loss = loss_of(layers, x)
        assert {n for site, n in columns(handle.plan).items() if "norm" in site} == {3}
        found = programs(handle)
        for layer, program, planted in zip(layers, found, PLANTED, strict=True):
            (normed,) = (b for b in program.graph.saved if program.graph.role(b) == Role.NORM_OUTPUT)
            state = outliers_of(handle, layer)[program.site(normed)]
            assert isinstance(state, OutlierState)
            assert state.channels == planted
        assert found[0] is found[1] is found[2]
        assert handle.stored_bytes() == sum(held_bytes(p) for p in found)
        assert found[0].packed_bytes(found[0].graph.saved[0]) == 0
        loss.backward()
        assert handle.stored_bytes() == 0


def test_the_first_calls_hold_the_predicted_bytes_too(x: Tensor) -> None:
    """Also where another layer is traced than the one that has outliers, and where nothing has settled yet."""
    layers = stack(((), (), (7, 8)))
    with attach(layers, "compress") as handle:
        loss = loss_of(layers, x)
        assert handle.traced_forwards == 2
        # No outliers in the layers that were traced: one column for 256 channels, at least one, stays reserved.
        assert {n for site, n in columns(handle.plan).items() if "norm" in site} == {1}
        (program,) = set(programs(handle))
        assert handle.stored_bytes() == 3 * held_bytes(program)
        (normed,) = (b for b in program.graph.saved if program.graph.role(b) == Role.NORM_OUTPUT)
        state = outliers_of(handle, layers[2])[program.site(normed)]
        assert isinstance(state, OutlierState)
        assert (len(state.channels), len(state.left_out)) == (1, 1)
        assert {*state.channels, *state.left_out} == {7, 8}
        loss.backward()


def test_after_a_layers_first_forward_nothing_is_observed(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observing waits for the device; encoding does not."""
    layers = stack(PLANTED)
    with attach(layers, "compress") as handle:
        for _ in range(2):
            loss_of(layers, x).backward()
        states = [outliers_of(handle, layer) for layer in layers]

        def refuse(self: object, *args: object) -> None:
            raise AssertionError("a channel list was made")

        for verb in ("highest", "outliers", "z_scores"):
            monkeypatch.setattr(f"megatron_adacc.codecs.statistics.ChannelStatistics.{verb}", refuse)
        for _ in range(2):
            loss_of(layers, x).backward()
        assert [outliers_of(handle, layer) for layer in layers] == states


def test_a_plan_file_keeps_the_columns_and_makes_the_lists_anew(x: Tensor, tmp_path: Any) -> None:
    layers = stack(PLANTED)
    with attach(layers, "compress") as handle:
        for _ in range(2):
            loss_of(layers, x).backward()
        handle.plan.save(tmp_path / "plan.json")
        held = 3 * held_bytes(programs(handle)[0])
    other = stack(((11, 12, 13),) * 3)
    with attach(other, tmp_path / "plan.json") as handle:
        loss = loss_of(other, x)
        assert handle.stored_bytes() == held
        lists = [s.channels for s in outliers_of(handle, other[2]).values()]
        assert (11, 12, 13) in lists
        loss.backward()


class TestPlanError:
    def settled(self, plan: str | Plan, x: Tensor) -> tuple[nn.Module, Program, Rehearsal]:
        layers = stack(((),))
        with attach(layers, plan) as handle:
            for _ in range(2):
                loss_of(layers, x)
            program = programs(handle)[0]
        return layers[0], program, Rehearsal(layers[0], layers[0].forward, (x,), {})

    def test_a_lossless_plan_has_none(self, x: Tensor) -> None:
        layer, program, rehearsal = self.settled("recompute", x)
        assert plan_error(program, layer, rehearsal) == 0.0

    def test_one_lossy_buffer_alone_has_its_own_error(self, x: Tensor) -> None:
        layer, program, rehearsal = self.settled("compress", x)
        graph = program.graph
        (hidden,) = (b for b in graph.saved if graph.buffers[b].site == "/gelu.0")
        action = program.action(hidden)
        assert isinstance(action, Compress)
        alone = Plan((replace(program.plan, actions=((graph.buffers[hidden].site, action),)),))
        layer, program, rehearsal = self.settled(alone, x)
        torch.manual_seed(2)
        whole = plan_error(program, layer, rehearsal)
        torch.manual_seed(2)
        (direct,) = gradient_errors(graph, rehearsal, [offer(graph, hidden, action)]).values()
        assert whole == pytest.approx(direct, rel=1e-5)
        assert whole > 0.01

    def test_what_is_recomputed_from_a_lossy_buffer_adds_to_it(self, x: Tensor) -> None:
        layer, program, rehearsal = self.settled("compress", x)
        graph = program.graph
        site = {name: f"{name}.0" for name in ("up/addmm", "/gelu")}
        (up,) = (b for b in graph.saved if graph.buffers[b].site == site["up/addmm"])
        action = Compress("group_int4")
        plan = replace(program.plan, actions=((site["up/addmm"], action), (site["/gelu"], Recompute())))
        layer, program, rehearsal = self.settled(Plan((plan,)), x)
        torch.manual_seed(2)
        whole = plan_error(program, layer, rehearsal)
        torch.manual_seed(2)
        (direct,) = gradient_errors(graph, rehearsal, [offer(graph, up, action)]).values()
        assert whole > 1.2 * direct > 0.01

    def test_errors_of_buffers_add_as_squares(self, x: Tensor) -> None:
        layer, program, rehearsal = self.settled("compress", x)
        graph, squares = program.graph, 0.0
        torch.manual_seed(2)
        whole = plan_error(program, layer, rehearsal)
        for buffer in graph.saved:
            action = program.action(buffer)
            if isinstance(action, Compress) and not action.lossless:
                torch.manual_seed(2)
                (error,) = gradient_errors(graph, rehearsal, [offer(graph, buffer, action)]).values()
                squares += error**2
        assert whole == pytest.approx(squares**0.5, rel=0.05)
