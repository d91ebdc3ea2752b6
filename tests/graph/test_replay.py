"""Replay writes over tensors that nobody needs any more, and over no others."""

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc.graph import LayerGraph, group_recipes, trace
from megatron_adacc.graph.replay import Context, Replayer
from megatron_adacc.graph.schema import out_variant

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (aten.mul.Tensor, aten.mul.out),
        (aten.pow.Tensor_Scalar, aten.pow.Tensor_Scalar_out),
        (aten.where.self, aten.where.self_out),
        (aten._softmax.default, aten._softmax.out),
        (aten.gelu_backward.default, None),  # its output argument has another name
        (aten.mul_.Tensor, aten.mul.out),
        (aten.native_layer_norm.default, None),  # three outputs
    ],
)
def test_out_variant_takes_the_same_arguments(function: object, expected: object) -> None:
    assert out_variant(function) is (None if function is aten.mul_.Tensor else expected)


class DroppedOut(nn.Module):
    """exp, dropout, sin: the dropped-out value is saved, and is the product of exp's result and the mask."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x.exp(), 0.5).sin()


@pytest.fixture
def graph() -> LayerGraph:
    return trace(DroppedOut(), torch.randn(8, 8, requires_grad=True))


def buffers(graph: LayerGraph) -> dict[str, int]:
    return {b.site: b.index for b in graph.buffers}


@pytest.mark.parametrize("private", [False, True])
def test_only_a_private_source_becomes_the_result(graph: LayerGraph, private: bool) -> None:
    at = buffers(graph)
    (group,) = group_recipes(graph, {at["/exp.0"], at["/div_.0"]}, [at["/mul.0"]])
    assert set(group.sources) == {at["/exp.0"], at["/div_.0"]}
    exponential, mask = torch.rand(8, 8), torch.rand(8, 8).gt(0.5).float() * 2
    expected, kept = exponential * mask, exponential.clone()
    own = frozenset({at["/div_.0"]} if private else ())
    replayer = Replayer(graph, group, Context((), torch.device("cpu")), own)
    result = replayer.run({at["/exp.0"]: exponential, at["/div_.0"]: mask}, DroppedOut())[at["/mul.0"]]
    assert torch.equal(result, expected)
    assert torch.equal(exponential, kept)
    assert (result.data_ptr() == mask.data_ptr()) is private
    assert result.data_ptr() != exponential.data_ptr()


class MaskedTwice(nn.Module):
    """One mask on two values, whose sum is saved."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5)
        return (x.exp() * mask + x.cos() * mask).sin()


def test_a_private_source_is_written_over_by_its_last_reader_only() -> None:
    graph = trace(MaskedTwice(), torch.randn(8, 8, requires_grad=True))
    at = buffers(graph)
    mask = at["/mul.0"]
    (group,) = group_recipes(graph, {at["/exp.0"], at["/cos.0"], mask}, [at["/add.0"]])
    assert len(group.steps) == 3
    replayer = Replayer(graph, group, Context((), torch.device("cpu")), frozenset({mask}))
    a, b, m = torch.rand(8, 8), torch.rand(8, 8), torch.rand(8, 8)
    found = replayer.run({at["/exp.0"]: a, at["/cos.0"]: b, mask: m.clone()}, MaskedTwice())
    assert torch.equal(found[at["/add.0"]], a * m + b * m)
