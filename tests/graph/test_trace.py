"""What a trace records: ops, buffers, saves, roles, names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_adacc.graph import LayerGraph, Origin, Role, fingerprint, from_json, to_json, trace


class Attention(nn.Module):
    """Unfused attention with one projection for query, key and value: [2, 8, 16] -> the same."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.projection = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 8, 2, 24).transpose(1, 2).chunk(3, dim=-1)
        p = self.dropout(F.softmax(q @ k.transpose(2, 3) * 0.35, dim=-1))
        return x + self.projection((p @ v).transpose(1, 2).reshape(2, 8, 16))


def traced(module: nn.Module, *shape: int) -> LayerGraph:
    return trace(module, torch.randn(shape, requires_grad=True))


def saved(graph: LayerGraph) -> dict[str, Role]:
    return {graph.buffers[b].site: graph.role(b) for b in graph.saved}


class TestSaves:
    def test_a_tensor_saved_by_two_ops_is_one_buffer(self) -> None:
        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                y = x.sigmoid()
                return y.square() * y.tanh()

        graph = traced(Twice(), 4, 8)
        assert saved(graph).keys() == {"/sigmoid.0", "/pow.0", "/tanh.0"}
        (sigmoid,) = (b for b in graph.saved if graph.buffers[b].site == "/sigmoid.0")
        assert len(graph.packs_of(sigmoid)) == 2  # by sigmoid and by square
        assert graph.activation_bytes == 3 * 4 * 8 * 4

    def test_query_key_and_value_of_one_projection_are_one_buffer(self) -> None:
        class OneProjection(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv = nn.Linear(16, 48)

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                return torch.softmax(q @ k.t(), -1) @ v

        graph = traced(OneProjection(), 8, 16)
        assert saved(graph) == {
            "input:0": Role.LINEAR_INPUT,
            "qkv/addmm.0": Role.QUERY_KEY_VALUE,
            "/_softmax.0": Role.ATTENTION_PROBABILITIES,
        }
        (qkv,) = (b for b in graph.saved if graph.buffers[b].site == "qkv/addmm.0")
        views = [graph.packs[i].view for i in graph.packs_of(qkv)]
        assert sorted(v.offset for v in views) == [0, 16, 32]
        assert graph.buffers[qkv].nbytes == 8 * 48 * 4

    def test_frozen_linear_saves_no_input(self) -> None:
        linear = nn.Linear(8, 8)
        assert saved(traced(linear, 4, 8)).keys() == {"input:0"}
        linear.requires_grad_(False)
        assert saved(traced(linear, 4, 8)) == {}

    def test_nothing_is_saved_without_gradients(self) -> None:
        layer = Attention()
        assert len(trace(layer, torch.randn(2, 8, 16)).packs) > 0
        layer.requires_grad_(False)
        assert trace(layer, torch.randn(2, 8, 16)).packs == ()

    def test_transposed_weight_is_named_as_the_parameter(self) -> None:
        graph = traced(nn.Linear(8, 4, bias=False), 3, 8)
        weights = [p.view for p in graph.packs if graph.buffers[p.view.buffer].origin == Origin.PARAMETER]
        assert [graph.buffers[v.buffer].name for v in weights] == ["weight"]
        assert weights[0].size == (8, 4)
        assert weights[0].stride == (1, 8)
        assert graph.parameter_packs == 1

    def test_parameters_in_one_storage_keep_their_names(self) -> None:
        layer = Attention()
        expected = traced(layer, 2, 8, 16)
        parameters = list(layer.parameters())
        shared = torch.cat([torch.zeros(5), *(p.detach().flatten() for p in parameters)])
        offset = 5
        for p in parameters:
            p.data = shared[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        assert fingerprint(traced(layer, 2, 8, 16)) == fingerprint(expected)


class TestRoles:
    def test_attention(self) -> None:
        assert saved(traced(Attention(), 2, 8, 16)) == {
            "input:0": Role.RESIDUAL,
            "norm/native_layer_norm.1": Role.STATISTICS,
            "norm/native_layer_norm.2": Role.STATISTICS,
            "norm/native_layer_norm.0": Role.NORM_OUTPUT,
            "/clone.0": Role.QUERY_KEY_VALUE,
            "/clone#1.0": Role.QUERY_KEY_VALUE,
            "/_softmax.0": Role.ATTENTION_PROBABILITIES,
            "dropout/div_.0": Role.DROPOUT_MASK,
            "dropout/mul.0": Role.ATTENTION_PROBABILITIES,
            "/clone#2.0": Role.QUERY_KEY_VALUE,
            "/clone#3.0": Role.LINEAR_INPUT,
        }

    def test_norm_written_out(self) -> None:
        class RmsNorm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(16))
                self.linear = nn.Linear(16, 16)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))

        roles = saved(traced(RmsNorm(), 4, 16))
        assert roles["/rsqrt.0"] == Role.STATISTICS
        assert roles["/mul#1.0"] == Role.NORM_OUTPUT


class TestIdentity:
    def test_json_gives_the_graph_back(self) -> None:
        graph = traced(Attention(), 2, 8, 16)
        again = from_json(to_json(graph))
        assert again == graph
        assert fingerprint(again) == fingerprint(graph)

    def test_json_of_another_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no layer graph|not a layer graph"):
            from_json('{"format": 0}')

    def test_layers_of_a_class_have_one_fingerprint(self) -> None:
        first = fingerprint(traced(Attention(), 2, 8, 16))
        assert fingerprint(traced(Attention(), 2, 8, 16)) == first
        assert fingerprint(traced(Attention(dropout=0.2), 2, 8, 16)) != first
        assert fingerprint(traced(Attention(dropout=0.0), 2, 8, 16)) != first

    def test_special_numbers_survive(self) -> None:
        class Fill(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
                return (x * 0.1).masked_fill(mask, float("-inf")).softmax(-1)

        graph = traced(Fill(), 4, 4)
        assert from_json(to_json(graph)) == graph
        assert float("-inf") in next(op for op in graph.ops if "masked_fill" in op.target).args

    def test_printed_table(self) -> None:
        lines = str(traced(nn.Linear(8, 4), 3, 8)).splitlines()
        assert lines[0] == "Linear: 1 ops, 2 packs (1 parameters), 1 saved buffers, 96 bytes"
        assert lines[1].split() == ["site", "role", "shape", "dtype", "bytes", "packs"]
        assert lines[3].split() == ["input:0", "linear", "input", "3x8", "float32", "96", "1"]


class TestOps:
    def test_views_are_no_ops(self) -> None:
        class Views(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.view(4, 4)[1:].t().unsqueeze(0).exp()

        graph = traced(Views(), 16)
        assert [op.target for op in graph.ops] == ["aten.exp.default"]
        (view,) = graph.ops[0].views()
        assert (view.size, view.stride, view.offset) == ((1, 4, 3), (4, 1, 4), 4)

    def test_in_place_op_makes_a_new_state(self) -> None:
        class InPlace(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return (x * 2).add_(1).exp()

        graph = traced(InPlace(), 4)
        mul, add, exp = graph.ops
        assert add.mutates[0][0].buffer == mul.writes[0]
        assert exp.reads == add.writes
        assert graph.buffers[add.writes[0]].storage == graph.buffers[mul.writes[0]].storage
        assert not graph.last_state(mul.writes[0])

    def test_random_ops_bar_replay_and_kernels_without_dropout_do_not(self) -> None:
        class Sdpa(nn.Module):
            def __init__(self, p: float) -> None:
                super().__init__()
                self.p = p

            def forward(self, x: Tensor) -> Tensor:
                q = x.view(1, 2, 8, 8)
                return F.scaled_dot_product_attention(q, q, q, dropout_p=self.p)

        assert [op.barrier for op in traced(Sdpa(0.0), 128).ops] == [None] * len(traced(Sdpa(0.0), 128).ops)
        assert "draws random numbers" in {op.barrier for op in traced(Sdpa(0.5), 128).ops}

    def test_submodule_used_twice_has_two_sites(self) -> None:
        class Reuse(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(self.linear(x).tanh())

        assert saved(traced(Reuse(), 2, 8)).keys() == {"input:0", "/tanh.0"}
        assert [op.module for op in traced(Reuse(), 2, 8).ops] == ["linear", "", "linear"]
        sites = [b.site for b in traced(Reuse(), 2, 8).buffers if b.origin == Origin.OP]
        assert sites == ["linear/addmm.0", "/tanh.0", "linear/addmm#1.0"]

    def test_small_tensors_made_from_numbers_are_literals(self) -> None:
        class Literal(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * torch.tensor([1.0, 2.0, 3.0])

        graph = traced(Literal(), 3)
        (literal,) = (b for b in graph.buffers if b.origin == Origin.LITERAL)
        assert literal.value == (1.0, 2.0, 3.0)


def fake_call(module_on: str, *shape: int) -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device(module_on):
        layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))
        graph = trace(layer, torch.randn(shape, requires_grad=True))
    return {graph.buffers[b].site: (graph.buffers[b].base.dtype, graph.buffers[b].nbytes) for b in graph.saved}


def test_fake_cuda_tensors_trace_without_a_gpu() -> None:
    """On CUDA dropout is fused and its mask is bool, one byte an element; nothing is computed here."""
    assert fake_call("cuda", 8, 16) == {
        "input:0": ("float32", 8 * 16 * 4),
        "0/native_layer_norm.1": ("float32", 8 * 4),
        "0/native_layer_norm.2": ("float32", 8 * 4),
        "0/native_layer_norm.0": ("float32", 8 * 16 * 4),
        "1/addmm.0": ("float32", 8 * 64 * 4),
        "2/gelu.0": ("float32", 8 * 64 * 4),
        "4/native_dropout.1": ("bool", 8 * 16),
    }
