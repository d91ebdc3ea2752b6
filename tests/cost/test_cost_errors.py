"""Gradient errors of lossy choices: what one backward with one buffer decoded differs by."""

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc import attach, codecs
from megatron_adacc.cost.errors import LOSSY_CODECS, gradient_errors, joint_error, lossy_choices
from megatron_adacc.cost.layer_problem import Offer, offer
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.timeline import OtherSavesError
from megatron_adacc.graph import LayerGraph, Role, fingerprint, trace, unverified
from megatron_adacc.planner import Compress, LayerPlan, Plan
from megatron_adacc.runtime.policy import CODEC_OF_ROLE


class Attention(nn.Module):
    """Causal attention and an MLP, dropout, q, k and v in one matrix or in three: [batch, sequence, 32]."""

    def __init__(self, fused: bool = True, sequence: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.ModuleList([nn.Linear(32, 96)] if fused else [nn.Linear(32, 32) for _ in range(3)])
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.register_buffer("mask", torch.ones(sequence, sequence, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = torch.cat([linear(normed) for linear in self.qkv], -1).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(self.mask, -10000.0)
        x = x + F.dropout(F.softmax(scores, -1), 0.1, self.training) @ v
        return x + self.down(F.gelu(self.up(x)))


def rehearsal_of(layer: nn.Module, *inputs: Tensor) -> tuple[LayerGraph, Rehearsal]:
    return trace(layer, *inputs), Rehearsal(layer, layer.forward, inputs, {})


def written(graph: LayerGraph, role: Role) -> list[int]:
    """Saved buffers of this role that an op of the layer wrote."""
    return [b for b in graph.saved if graph.role(b) == role and graph.buffers[b].writer is not None]


def uncompiled(choice: Offer, graph: LayerGraph) -> Offer:
    """The choice with the codec's reference: the same bits without compilation."""
    options = (*choice.action.options, ("implementation", "torch"))
    return offer(graph, choice.buffer, Compress(choice.action.codec, options))


def choices_of(graph: LayerGraph) -> list[Offer]:
    return [uncompiled(choice, graph) for choice in lossy_choices(graph, unverified(graph), 0)]


def sized(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(3)


def trained(layer: nn.Module, x: Tensor, plan: Plan) -> list[Tensor]:
    """Gradients of the parameters and of x in the layer's first call under the plan, with the random numbers of a
    rehearsal that begins at seed 9."""
    layer.zero_grad()
    x.grad = None
    torch.manual_seed(9)
    with attach(layer, plan, min_bytes=0):
        y = layer(x)
        y.backward(torch.empty(y.shape).normal_())
    return [p.grad.clone() for p in layer.parameters()] + [x.grad.clone()]


class AddingLinear(torch.autograd.Function):
    """x W^T, whose weight gradient is added to weight.main_grad and not returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.main_grad.add_(dy.T @ x)
        return dy @ weight, None


class Doubled(nn.Module):
    """One linear layer on 2 x, its weight gradient fused or not."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        return AddingLinear.apply(2 * x, self.weight) if self.fused else (2 * x) @ self.weight.T


Setting = tuple[nn.Module, Tensor, LayerGraph, Rehearsal]


@pytest.fixture
def setting() -> Setting:
    layer, x = Attention(), sized(2, 32, 32)
    return layer, x, *rehearsal_of(layer, x)


class TestErrors:
    def test_one_number_by_hand(self) -> None:
        """Linear, GELU, linear: the GELU's output enters only the second weight's gradient, dyT h."""
        layer, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)), sized(40, 32)
        graph, rehearsal = rehearsal_of(layer, x)
        (hidden,) = written(graph, Role.LINEAR_INPUT)
        choice = uncompiled(offer(graph, hidden, Compress("group_int4")), graph)
        torch.manual_seed(8)
        errors = gradient_errors(graph, rehearsal, [choice])
        torch.manual_seed(8)
        dy = torch.empty(40, 16).normal_()  # the rehearsal's gradient of the output
        h = layer[1](layer[0](x)).detach()
        codec = codecs.get("group_int4", implementation="torch")
        weight_error = (dy.T @ (codec.decode(codec.encode(h)) - h)).norm() / (dy.T @ h).norm()
        # Five tensors: two weights, two biases, the input.
        assert errors == {(hidden, choice.label): pytest.approx(float(weight_error) / math.sqrt(5), rel=1e-5)}
        assert 0.02 < float(weight_error) < 0.3

    def test_each_equals_training_under_a_plan_with_that_action(self, setting: Setting) -> None:
        layer, x, graph, rehearsal = setting
        choices = choices_of(graph)
        torch.manual_seed(9)
        errors = gradient_errors(graph, rehearsal, choices)
        assert len(errors) == len(choices) == 24
        exact = trained(layer, x, Plan((LayerPlan(fingerprint(graph), ()),)))
        for choice in choices:
            action = (graph.buffers[choice.buffer].site, choice.action)
            lossy = trained(layer, x, Plan((LayerPlan(fingerprint(graph), (action,)),)))
            squares = [float((a - b).norm() / b.norm()) ** 2 for a, b in zip(lossy, exact, strict=True)]
            expected = math.sqrt(sum(squares) / len(squares))
            assert errors[choice.buffer, choice.label] == pytest.approx(expected, rel=1e-4), choice
            assert expected > 1e-4

    def test_a_lossless_codec_costs_nothing(self, setting: Setting) -> None:
        """So each backward saw the same random gradient and the same dropout masks."""
        _, _, graph, rehearsal = setting
        masks = [b for b in graph.saved if graph.role(b) == Role.DROPOUT_MASK]
        choices = [offer(graph, b, Compress("bitmask")) for b in masks]
        assert list(gradient_errors(graph, rehearsal, choices).values()) == [0.0]

    def test_more_bits_cost_less(self, setting: Setting) -> None:
        _, _, graph, rehearsal = setting
        (normed,) = written(graph, Role.NORM_OUTPUT)
        choices = [uncompiled(offer(graph, normed, Compress(f"group_int{n}")), graph) for n in (2, 4, 8)]
        two, four, eight = gradient_errors(graph, rehearsal, choices).values()
        assert two > 3 * four > 30 * eight > 0

    def test_errors_of_several_buffers_add_as_squares(self, setting: Setting) -> None:
        _, _, graph, rehearsal = setting
        first = {c.buffer: c for c in reversed(choices_of(graph))}
        torch.manual_seed(5)
        alone = gradient_errors(graph, rehearsal, first.values())
        torch.manual_seed(5)
        together = joint_error(graph, rehearsal, first.values())
        assert len(alone) == 7
        assert together == pytest.approx(math.sqrt(sum(e * e for e in alone.values())), rel=0.05)
        assert joint_error(graph, rehearsal, ()) == 0.0

    def test_training_is_not_disturbed(self, setting: Setting) -> None:
        layer, x, graph, rehearsal = setting
        layer(x).sum().backward()
        before = [p.grad.clone() for p in layer.parameters()] + [x.grad.clone()]
        state = torch.get_rng_state()
        gradient_errors(graph, rehearsal, choices_of(graph)[:2])
        assert torch.equal(torch.get_rng_state(), state)
        after = [p.grad for p in layer.parameters()] + [x.grad]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

    def test_when_the_time_is_over_nothing_more_is_measured(self, setting: Setting) -> None:
        _, _, graph, rehearsal = setting
        choices = choices_of(graph)
        assert gradient_errors(graph, rehearsal, choices, seconds=0.0) == {}

        def slow(choices: list[Offer]) -> Iterator[Offer]:
            yield choices[0]
            time.sleep(0.5)
            yield choices[1]

        found = gradient_errors(graph, rehearsal, slow(choices), seconds=0.5)
        assert list(found) in ([(choices[0].buffer, choices[0].label)], [])

    def test_a_gradient_that_is_zero_but_for_rounding_does_not_count_as_large(self) -> None:
        """Softmax does not see the bias of the keys: its exact gradient is rounding noise."""
        layer, x = Attention(fused=False), sized(2, 32, 32)
        graph, rehearsal = rehearsal_of(layer, x)
        choices = [c for c in choices_of(graph) if c.action.codec == "affine_int4"]
        choices = [c for c in choices if graph.role(c.buffer) == Role.ATTENTION_PROBABILITIES]
        assert len(choices) == 2
        exact, lossy = (
            trained(layer, x, Plan((LayerPlan(fingerprint(graph), actions),)))
            for actions in ((), ((graph.buffers[choices[0].buffer].site, choices[0].action),))
        )
        place = [name for name, _ in layer.named_parameters()].index("qkv.1.bias")
        assert float((lossy[place] - exact[place]).norm() / exact[place].norm()) > 100
        assert all(0.001 < e < 0.5 for e in gradient_errors(graph, rehearsal, choices).values())

    def test_a_gradient_that_is_not_finite_is_no_offer(self) -> None:
        layer, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)), sized(40, 32)
        with torch.no_grad():
            layer[2].weight[:] = 3e38
        graph, rehearsal = rehearsal_of(layer, x)
        assert gradient_errors(graph, rehearsal, choices_of(graph)) == {}

    def test_another_forward_than_the_trace_is_an_error(self) -> None:
        layer, x = Attention(), sized(2, 32, 32)
        graph = trace(layer, x)
        with pytest.raises(OtherSavesError, match=r"of shape \(3, 32, 32\) as number 1"):
            gradient_errors(graph, Rehearsal(layer, layer.forward, (sized(3, 32, 32),), {}), ())
        layer.eval()  # no dropout masks
        with pytest.raises(OtherSavesError):
            gradient_errors(graph, Rehearsal(layer, layer.forward, (x,), {}), ())

    def test_a_fused_weight_gradient_is_seen(self) -> None:
        """What is added to main_grad, as Megatron's linear layers do, counts like a .grad."""
        plain, fused = Doubled(fused=False), Doubled(fused=True)
        fused.load_state_dict(plain.state_dict())
        for parameter in fused.parameters():
            parameter.main_grad = torch.ones_like(parameter)
        x, found = sized(40, 32), []
        for layer in (plain, fused):
            graph, rehearsal = rehearsal_of(layer, x)
            torch.manual_seed(1)
            (doubled,) = (b for b in graph.saved if graph.buffers[b].writer is not None)
            choices = [uncompiled(offer(graph, doubled, Compress("group_int4")), graph)]
            found.append(list(gradient_errors(graph, rehearsal, choices).values()))
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        assert len(found[0]) == 1
        assert found[0][0] > 0.01
        assert all(torch.equal(p.main_grad, torch.ones_like(p)) for p in fused.parameters())


class TestChoices:
    def test_each_buffers_first_choice_comes_first_and_large_buffers_before_small(self, setting: Setting) -> None:
        _, _, graph, _ = setting
        choices = lossy_choices(graph, unverified(graph), 0)
        buffers = list(dict.fromkeys(c.buffer for c in choices))
        first = choices[: len(buffers)]
        assert [c.buffer for c in first] == buffers
        sizes = [graph.buffers[b].nbytes for b in buffers]
        assert sizes == sorted(sizes, reverse=True)
        assert all(c.action.codec == LOSSY_CODECS[graph.role(c.buffer)][0] for c in first)
        assert len({(c.buffer, c.label) for c in choices}) == len(choices)

    def test_only_float_activations_of_the_layers_own_without_masks_statistics_and_small_ones(
        self, setting: Setting
    ) -> None:
        _, _, graph, _ = setting
        evidence = unverified(graph)
        offered = {c.buffer for c in lossy_choices(graph, evidence, 0)}
        roles = {graph.role(b) for b in graph.saved if b not in offered}
        assert roles == {Role.STATISTICS, Role.DROPOUT_MASK, Role.RESIDUAL}
        assert {graph.buffers[b].site for b in set(graph.saved) - offered} >= {"input:0"}
        assert {c.buffer for c in lossy_choices(graph, evidence, 8193)} < offered
        assert lossy_choices(graph, evidence, 10**9) == ()

    def test_the_first_choice_is_what_compress_takes(self) -> None:
        assert {role: names[0] for role, names in LOSSY_CODECS.items()} == CODEC_OF_ROLE

    def test_every_codec_is_offered_with_its_exact_bytes(self, setting: Setting) -> None:
        _, _, graph, _ = setting
        for choice in choices_of(graph):
            base = graph.buffers[choice.buffer].base
            assert choice.codec.encode(torch.randn(base.size)).nbytes == choice.packed_bytes
