"""Prices from the device table: flops and bytes by hand, and the roofline over them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron_adacc import codecs
from megatron_adacc.cost.analytic import AnalyticPrices
from megatron_adacc.cost.analytic_backward import backward_work, with_gradient
from megatron_adacc.cost.counts import collective_bytes, is_half_of_dropout, op_bytes, op_flops, op_leaf
from megatron_adacc.cost.devices import DeviceSpec
from megatron_adacc.graph import trace
from megatron_adacc.graph.model import Buffer, LayerGraph, Op, Origin, Tagged, View

BATCH, SEQUENCE, HIDDEN, HEADS = 2, 8, 16, 4


class GptLayer(nn.Module):
    """[batch, sequence, hidden] -> the same; unfused attention."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(BATCH, SEQUENCE, HEADS, -1).transpose(1, 2).chunk(3, dim=-1)
        probabilities = F.dropout(F.softmax(q @ k.transpose(2, 3), dim=-1), self.dropout)
        context = (probabilities @ v).transpose(1, 2).reshape(BATCH, SEQUENCE, HIDDEN)
        x = x + self.projection(context)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Lambda(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def graph_of(function, *args):
    return trace(Lambda(function), *args)


def only_op(function, *args):
    graph = graph_of(function, *args)
    (op,) = [op for op in graph.ops if op_leaf(op) not in ("empty", "empty_strided", "clone")]
    return graph, op


def device(**changes) -> DeviceSpec:
    """Round figures: 100 flops and 10 bytes a nanosecond, 1 byte a nanosecond on the link, free launches."""
    spec = DeviceSpec(
        name="round", full_name="", capability=(7, 0), memory_bytes=2**30,
        peak_flops={"float16": 400e9, "float32": 200e9}, matmul_fraction=0.5, bandwidth=20e9, bandwidth_fraction=0.5,
        link=2e9, link_fraction=0.5, launch_us=0.0, source=(),
    )  # fmt: skip
    return replace(spec, **changes)


# ---- flops ----


def test_flops_of_a_gpt_layer():
    graph = trace(GptLayer(), torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True))
    total = sum(op_flops(op) for op in graph.ops)
    assert total == 24 * BATCH * SEQUENCE * HIDDEN**2 + 4 * BATCH * SEQUENCE**2 * HIDDEN


@pytest.mark.parametrize(
    ("function", "shapes", "flops", "elements"),
    [
        (torch.mm, [(3, 5), (5, 7)], 2 * 3 * 5 * 7, 15 + 35 + 21),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7, 30 + 70 + 42),
        (torch.addmm, [(7,), (3, 5), (5, 7)], 2 * 3 * 5 * 7, 7 + 15 + 35 + 21),
        (torch.baddbmm, [(2, 3, 7), (2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7, 42 + 30 + 70 + 42),
        (lambda c, a, b: torch.baddbmm(c, a, b, beta=0.0), [(2, 3, 7), (2, 3, 5), (2, 5, 7)], 420, 30 + 70 + 42),
        (F.linear, [(4, 3, 5), (7, 5)], 2 * 12 * 5 * 7, 60 + 35 + 84),
        (lambda x: F.softmax(x, -1), [(3, 5)], 0, 30),
        (torch.add, [(3, 5), (5,)], 0, 15 + 5 + 15),
        (lambda x, y: x * y.expand(3, 5), [(3, 5), (3, 1)], 0, 15 + 3 + 15),
        (lambda x: x * x, [(3, 5)], 0, 15 + 15),
        (F.gelu, [(3, 5)], 0, 30),
    ],
)
def test_flops_and_bytes_of_an_op(function, shapes, flops, elements):
    graph, op = only_op(function, *(torch.randn(shape) for shape in shapes))
    assert op_flops(op) == flops
    assert op_bytes(graph, op) == 4 * elements


def test_bytes_by_dtype():
    graph, op = only_op(lambda x: x.half(), torch.randn(10))
    assert op_bytes(graph, op) == 40 + 20
    graph, op = only_op(lambda x: x > 0, torch.randn(10))
    assert op_bytes(graph, op) == 40 + 10


def test_bytes_of_an_in_place_op():
    graph, op = only_op(lambda x, m: x.masked_fill_(m, 0.0), torch.randn(4, 6), torch.ones(6, dtype=torch.bool))
    assert op_bytes(graph, op) == 96 + 6 + 96  # read, mask, written


def test_a_copy_over_a_tensor_does_not_read_it():
    graph, op = only_op(lambda x, y: x.copy_(y), torch.randn(4, 6), torch.randn(4, 6))
    assert op_bytes(graph, op) == 96 + 96


def test_an_embedding_reads_its_rows_and_not_its_table():
    graph, op = only_op(lambda w, i: F.embedding(i, w), torch.randn(1000, 8), torch.arange(5))
    assert op_bytes(graph, op) == 2 * 5 * 8 * 4 + 5 * 8


def test_norm_bytes_include_the_statistics():
    layer = nn.LayerNorm(16)
    graph = trace(layer, torch.randn(3, 16))
    (op,) = graph.ops
    assert op_bytes(graph, op) == 4 * (48 + 16 + 16 + 48 + 3 + 3)


@pytest.mark.parametrize(("causal", "pairs"), [(False, 8 * 8), (True, 8 * 9 // 2)])
def test_flops_of_attention(causal, pairs):
    query, key, value = (torch.randn(2, 4, 8, 16) for _ in range(3))
    graph = graph_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), query, key, value)
    (op,) = [op for op in graph.ops if "scaled_dot_product" in op.target]
    assert op_flops(op) == 4 * 2 * 4 * pairs * 16


def test_allocation_is_free():
    graph = trace(GptLayer(), torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True))
    prices = AnalyticPrices(device(launch_us=3.0))
    (empty,) = [op for op in graph.ops if op_leaf(op) == "empty_like"]
    assert op_bytes(graph, empty) == 0
    assert prices.op_us(graph, empty.index) == 0.0


# ---- collectives ----


def collective(target: str, read: tuple[int, ...], written: tuple[int, ...]) -> tuple[LayerGraph, Op]:
    """A graph of one functional collective, float32."""
    source = View(0, read, (1,), 0, "float32")
    result = View(1, written, (1,), 0, "float32")
    op = Op(0, target, "", (source, Tagged("object", 0, "ProcessGroup")), (), (1,), collective=True)
    buffers = (
        Buffer(0, 0, "in", Origin.INPUT, "", source.nbytes, source),
        Buffer(1, 1, "out", Origin.OP, "", result.nbytes, result, writer=0),
    )
    return LayerGraph("", (), (op,), buffers, (), ()), op


@pytest.mark.parametrize(
    ("target", "read", "written", "sent"),
    [
        ("_c10d_functional.all_reduce.default", 1000, 1000, 2 * 3 / 4 * 4000),
        ("_c10d_functional.all_gather_into_tensor.default", 1000, 8000, 7 / 8 * 32000),
        ("_c10d_functional.reduce_scatter_tensor.default", 8000, 1000, 7 / 8 * 32000),
        ("_c10d_functional.all_to_all_single.default", 1000, 1000, 3 / 4 * 4000),
        ("_c10d_functional.broadcast.default", 1000, 1000, 4000),
    ],
)
def test_bytes_that_a_collective_sends(target, read, written, sent):
    graph, op = collective(target, (read,), (written,))
    assert collective_bytes(graph, op, 4) == sent
    assert AnalyticPrices(device(launch_us=5.0), ranks=4).op_us(graph, 0) == pytest.approx(5 + sent / 1000)


def test_a_collective_of_one_rank_sends_nothing():
    graph, op = collective("_c10d_functional.all_reduce.default", (1000,), (1000,))
    assert collective_bytes(graph, op, 1) == 0


def test_collectives_of_c10d_by_the_same_formulas():
    source = View(0, (1000,), (1,), 0, "float32")
    op = Op(0, "c10d.allreduce_.default", "", ((source,),), (), (), mutates=((source, 1),), collective=True)
    buffers = tuple(Buffer(i, 0, str(i), Origin.OP, "", 4000, replace(source, buffer=i)) for i in range(2))
    assert collective_bytes(LayerGraph("", (), (op,), buffers, (), ()), op, 2) == 4000


# ---- prices ----


def test_the_roofline():
    # 2 * 64**3 flops at 100 a ns, 3 * 64**2 * 4 bytes at 10 a ns.
    graph, op = only_op(torch.mm, torch.randn(64, 64), torch.randn(64, 64))
    by_flops, by_bytes = 2 * 64**3 / 100e3, 3 * 64**2 * 4 / 10e3
    assert by_flops > by_bytes
    assert AnalyticPrices(device(launch_us=1.5)).op_us(graph, op.index) == pytest.approx(1.5 + by_flops)
    slow = device(bandwidth=2e9)
    assert AnalyticPrices(slow).op_us(graph, op.index) == pytest.approx(10 * by_bytes)
    graph, op = only_op(torch.mm, torch.randn(64, 64).half(), torch.randn(64, 64).half())
    assert AnalyticPrices(device()).op_us(graph, op.index) == pytest.approx(by_flops / 2)


def test_random_ops_are_never_replayed():
    graph = trace(GptLayer(), torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True))
    prices = AnalyticPrices(device())
    (random,) = [op for op in graph.ops if op.barrier is not None]
    assert prices.op_us(graph, random.index) is None
    assert prices.forward_us(graph, random) == pytest.approx(2 * 4 * BATCH * HEADS * SEQUENCE**2 / 10e3)


def test_a_codec_is_one_pass():
    price = AnalyticPrices(device(launch_us=2.0)).codec(codecs.get("bitmask"), (2, 2**14), torch.float32)
    # 2**15 elements of 4 bytes; 2**12 bytes of bits and two blocks of two values.
    assert price.encode_us == price.decode_us == pytest.approx(2 + (2**17 + 2**12 + 16) / 10e3)


def test_a_step_of_a_linear_chain_is_three_times_its_products():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.second(self.first(x))

    graph = trace(Chain(), torch.randn(64, 64, requires_grad=True))
    prices = AnalyticPrices(device())
    forward = sum(prices.forward_us(graph, op) for op in graph.ops)
    assert forward == pytest.approx(2 * 2 * 64**3 / 100e3)
    assert prices.step_us(graph) == pytest.approx(3 * forward)


def test_backward_kernels():
    x = torch.randn(3, 5, requires_grad=True)
    bias = nn.Parameter(torch.randn(5))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = bias

        def forward(self, x):
            return torch.tanh((x + self.bias) * 2.0) * x

    graph = trace(Layer(), x)
    work = [(w.flops, w.bytes // 4) for w in backward_work(graph)]
    assert work == [
        (0, 15 + 5),  # the sum over rows for the bias; x's gradient passes through the addition
        (0, 15 + 15),  # times 2: gradient read, gradient written
        (0, 15 + 15 + 15),  # tanh: gradient and result read, gradient written
        (0, 15 + 15 + 15),  # the product, for tanh
        (0, 15 + 15 + 15),  # the product, for x
        (0, 15 + 15 + 15),  # the two gradients of x
    ]


def test_masks_have_no_backward():
    graph = trace(GptLayer(), torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True))
    ops, carrying = with_gradient(graph)
    (random,) = [op for op in graph.ops if op.barrier is not None]
    (scaled,) = [op for op in graph.ops if op_leaf(op) == "div_"]
    assert ops.isdisjoint({random.index, scaled.index})
    assert carrying.isdisjoint(scaled.writes)
    products = [op.index for op in graph.ops if op_flops(op)]
    assert ops.issuperset(products)


def test_dropout_written_as_two_ops_counts_once():
    source, mask, result = (View(i, (100,), (1,), 0, "float32" if i != 1 else "bool") for i in range(3))
    first = Op(0, "aten.native_dropout.default", "", (source, 0.1, True), (), (None, 1), barrier="draws")
    second = Op(1, "aten.native_dropout_backward.default", "", (source, mask, 1.1), (), (2,))
    buffers = tuple(
        Buffer(v.buffer, v.buffer, "", Origin.OP if v.buffer else Origin.INPUT, "", v.nbytes, v)
        for v in (source, mask, result)
    )
    graph = LayerGraph("", (), (first, second), buffers, (), ())
    assert is_half_of_dropout(graph, first)
    assert not is_half_of_dropout(graph, second)
    assert op_bytes(graph, second) == 400 + 100 + 400
    assert AnalyticPrices(device()).step_us(graph) == pytest.approx(900 / 10e3)
