"""The deferred check of masks stored as bits, on CPU tensors, and that codecs compile before training goes on."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc import attach
from megatron_adacc.codecs.bitmask import BitmaskState, NotTwoValuedError
from megatron_adacc.planner import Compress, LayerPlan, Plan
from megatron_adacc.runtime.mask_check import MaskCheck

CPU = torch.device("cpu")


class TestMaskCheck:
    def test_nothing_found(self) -> None:
        check = MaskCheck(CPU)
        for _ in range(3):
            check.poll()
        check.close()

    def test_a_violation_is_raised_by_the_poll_after_the_next(self) -> None:
        check = MaskCheck(CPU)
        check.poll()
        check.state.violations.fill_(1)
        check.poll()  # copies what the next one reads: it does not wait for the device
        with pytest.raises(NotTwoValuedError, match="more than two different values"):
            check.poll()
        with pytest.raises(NotTwoValuedError, match="more than two different values"):
            check.poll()

    def test_a_violation_in_the_last_step_is_raised_at_the_end(self) -> None:
        check = MaskCheck(CPU)
        check.poll()
        check.state.violations.fill_(1)
        with pytest.raises(NotTwoValuedError):
            check.close()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(x)), 0.1)


def step(layers: nn.ModuleList) -> None:
    x = torch.randn(256, 512, requires_grad=True)
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()


class TestInLayers:
    def test_the_first_layer_of_a_class_polls_and_detach_closes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = nn.ModuleList(Block() for _ in range(3))
        handle = attach(layers, "recompute")
        (cache,) = handle._caches
        check = MaskCheck(CPU)
        cache._mask_checks[CPU] = check
        polls = []
        monkeypatch.setattr(MaskCheck, "poll", lambda self: polls.append(self))
        for _ in range(4):
            step(layers)
        assert polls == [check] * 4
        check.state.violations.fill_(1)
        with pytest.raises(NotTwoValuedError):
            handle.detach()
        assert "forward" not in layers[0].__dict__

    def test_an_exception_is_not_replaced_by_what_the_check_finds(self) -> None:
        layers = nn.ModuleList([Block()])
        handle = attach(layers, "recompute")
        handle._caches[0]._mask_checks[CPU] = MaskCheck(CPU)
        handle._caches[0]._mask_checks[CPU].state.violations.fill_(1)
        with pytest.raises(RuntimeError, match="shape"), handle:
            layers[0](torch.randn(4, 3, requires_grad=True))
        assert "forward" not in layers[0].__dict__

    def test_bitmask_alone_gets_the_state(self) -> None:
        from megatron_adacc.runtime.program import EncodeEntry, Program

        layers = nn.ModuleList([Block()])
        with attach(layers, "compress") as handle:
            for _ in range(2):
                step(layers)
            (trace,) = handle._caches[0].traces()
            (program,) = trace.programs.values()
        state = BitmaskState.on(CPU)
        with_state = Program(
            program.graph, program.plan, program.context, program.constants, program.states, mask_state=state
        )
        states = {e.codec.name: e.state for e in with_state.entries if isinstance(e, EncodeEntry)}
        assert states["bitmask"] is state
        assert {s for name, s in states.items() if name != "bitmask"} == {None}
        assert len(states) > 1


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class TestWarmUp:
    def test_nothing_compiles_once_the_trace_has_settled(self) -> None:
        # The third layer alone has codecs of eight and two bits: it is not among those that are traced.
        layers = nn.ModuleList(Block() for _ in range(3))
        with attach(layers, "recompute") as handle:
            step(layers)
            (made,) = handle.plan.layers
        sites = dict(made.actions)
        mask = next(site for site, action in sites.items() if action == Compress("bitmask"))
        others = [site for site in sites if site != mask]
        last = LayerPlan(
            made.fingerprint,
            ((mask, Compress("bitmask")), *((site, Compress("group_int8")) for site in others[:1]),
             *((site, Compress("group_int2", (("group_size", 64),))) for site in others[1:])),
            layer=2,
        )  # fmt: skip
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with attach(layers, Plan((made, last))) as handle:
            seen = []
            x = torch.randn(256, 512, requires_grad=True)
            x = layers[1](layers[0](x))
            seen.append(compilations())
            step(layers)
            step(layers)
            seen.append(compilations())
            assert set(handle.plan.layers) == {made, last}
        assert seen[0] > 0
        assert seen[1] == seen[0]
