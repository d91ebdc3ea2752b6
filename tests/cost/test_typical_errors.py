"""Assumed errors: there for every choice that is offered, and about what a layer shows that is measured."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc.cost.errors import LOSSY_CODECS, gradient_errors, lossy_choices
from megatron_adacc.cost.layer_problem import offer
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.typical_errors import TYPICAL, typical_errors
from megatron_adacc.graph import Role, trace, unverified
from megatron_adacc.planner import Compress


class Layer(nn.Module):
    """Attention with one head and an MLP with SiLU: [batch, 64, 64] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv = nn.Linear(64, 192)
        self.projection = nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.projection(F.softmax(q @ k.transpose(1, 2) / 8, -1) @ v)
        return x + self.down(F.silu(self.up(self.norm2(x))))


def test_every_choice_has_one() -> None:
    assert set(TYPICAL) == {(role, name) for role, names in LOSSY_CODECS.items() for name in names}


@pytest.mark.parametrize("role", list(LOSSY_CODECS))
def test_fewer_bits_cost_more(role: Role) -> None:
    bits = sorted(LOSSY_CODECS[role], key=lambda name: -int(name[-1]))
    errors = [TYPICAL[role, name] for name in bits if not (name.startswith("affine") and len(bits) == 4)]
    assert errors == sorted(errors)
    assert errors[0] < 0.01
    assert 0.1 < errors[-1] < 0.3


def test_a_layer_that_is_measured_has_errors_of_this_size() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 64, 64, requires_grad=True)
    graph = trace(layer, x)
    choices = [
        offer(graph, c.buffer, Compress(c.action.codec, (*c.action.options, ("implementation", "torch"))))
        for c in lossy_choices(graph, unverified(graph))
    ]
    measured = gradient_errors(graph, Rehearsal(layer, layer.forward, (x,), {}), choices)
    assumed = typical_errors(graph, choices)
    assert assumed.keys() == measured.keys()
    ratios = [assumed[key] / measured[key] for key in assumed]
    # The largest of a role is assumed for all its buffers.
    assert all(0.7 < ratio < 3 for ratio in ratios), ratios
    assert sorted(ratios)[len(ratios) // 2] == pytest.approx(1.79, rel=0.1)


def test_a_codec_that_is_not_in_the_table_is_left_out() -> None:
    layer, x = Layer(), torch.randn(4, 64, 64, requires_grad=True)
    graph = trace(layer, x)
    (probabilities,) = (b for b in graph.saved if graph.role(b) == Role.ATTENTION_PROBABILITIES)
    choices = [offer(graph, probabilities, Compress(name)) for name in ("affine_int4", "group_int4", "bitmask")]
    assert typical_errors(graph, choices) == {(probabilities, "affine_int4"): 0.019}
