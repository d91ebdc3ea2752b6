"""What each op of a traced layer computes and moves: exact counts, from sizes alone.

flops: a multiplication and an addition count as two. Matrix products and attention alone are counted; all other ops
are bound by the memory on every device of the table.

    mm, addmm [m, k] x [k, n]                       2 m k n
    bmm, baddbmm [b, m, k] x [b, k, n]              2 b m k n
    attention, query [b, h, s, d], key [b, g, t, d] 4 b h s t d; causal with s = t: 2 b h s (s + 1) d

bytes: every operand once, every result once; of a broadcast operand its own bytes; of a table that is looked up (an
embedding) the rows that are read. An op that only allocates moves nothing. A submodule's opaque call and a region of
torch.compile move their arguments, parameters and results once.

Collectives of n ranks send (the factors of nccl-tests' bus bandwidth, doc/PERFORMANCE.md; ring algorithm)

    all-reduce of B bytes          2 (n - 1) / n B
    all-gather to B, reduce-scatter from B, all-to-all of B bytes      (n - 1) / n B
    broadcast, reduce of B bytes   B
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_adacc.graph import schema
from megatron_adacc.graph.model import DTYPE_BYTES, FLOAT_DTYPES, Argument, LayerGraph, Op, View, views_in
from megatron_adacc.graph.tracer import CALL_PREFIX, COMPILED, EMPTY_NAMES


def op_leaf(op: Op) -> str:
    """``mm`` for ``aten.mm.default``; empty for an opaque call or a compiled region."""
    if op.target == COMPILED or op.target.startswith(CALL_PREFIX):
        return ""
    return op.target.split(".")[1]


def view_bytes(view: View) -> int:
    """Bytes of the different elements of a view: one of a broadcast dimension."""
    distinct = math.prod(size for size, stride in zip(view.size, view.stride, strict=True) if stride != 0)
    return distinct * DTYPE_BYTES.get(view.dtype, 1)


@dataclass(frozen=True)
class Work:
    """What one kernel does: ``flops`` on operands of ``dtype``, and ``bytes`` read and written."""

    flops: int
    bytes: int
    dtype: str = "float32"


def op_work(graph: LayerGraph, op: Op) -> Work:
    """Flops and bytes of an op that is no collective."""
    # The last float operand: of an addmm, a factor.
    floats = [v.dtype for v in op.views() if v.dtype in FLOAT_DTYPES]
    return Work(op_flops(op), op_bytes(graph, op), floats[-1] if floats else "float32")


def is_half_of_dropout(graph: LayerGraph, op: Op) -> bool:
    """Whether a trace wrote this dropout as two ops, the mask's and the product's: one kernel does both, and the
    second op has all of its bytes."""
    return op_leaf(op) == "native_dropout" and op.outputs[0] is None


# ---- flops ----


def _argument(op: Op, name: str) -> Argument:
    """An argument by its name in the op's schema."""
    for keyword, value in op.kwargs:
        if keyword == name:
            return value
    for position, declared in enumerate(schema.find_op(op.target)._schema.arguments):
        if declared.name == name:
            return op.args[position] if position < len(op.args) else declared.default_value
    raise KeyError(f"{op.target} has no argument {name}")


def _tensor(op: Op, name: str) -> View:
    value = _argument(op, name)
    assert isinstance(value, View)
    return value


def _product(left: View, right: View) -> int:
    """[..., m, k] x [..., k, n]; the right one's leading dimensions do not count."""
    return 2 * left.numel * right.size[-1]


def _attention(op: Op) -> int:
    query, key = _tensor(op, "query"), _tensor(op, "key")
    batch, heads, queries, width = query.size
    keys = key.size[-2]
    pairs = queries * (queries + 1) // 2 if _argument(op, "is_causal") and queries == keys else queries * keys
    return 4 * batch * heads * pairs * width


ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)

_PRODUCTS: Mapping[str, Callable[[Op], int]] = MappingProxyType(
    {
        "mm": lambda op: _product(_tensor(op, "self"), _tensor(op, "mat2")),
        "bmm": lambda op: _product(_tensor(op, "self"), _tensor(op, "mat2")),
        "addmm": lambda op: _product(_tensor(op, "mat1"), _tensor(op, "mat2")),
        "baddbmm": lambda op: _product(_tensor(op, "batch1"), _tensor(op, "batch2")),
        # The weight is [n, k].
        "linear": lambda op: 2 * _tensor(op, "input").numel * _tensor(op, "weight").size[0],
    }
)


def op_flops(op: Op) -> int:
    """Floating-point operations of matrix products and attention; 0 for other ops."""
    leaf = op_leaf(op).removesuffix("_") if op_leaf(op) in ("addmm_", "baddbmm_") else op_leaf(op)
    if leaf in ATTENTION:
        return _attention(op)
    count = _PRODUCTS.get(leaf)
    return 0 if count is None else count(op)


# ---- bytes ----

LOOKUPS = frozenset({"embedding", "index_select", "index", "gather"})

# What no kernel runs for.
FREE = frozenset({"wait_tensor", "barrier"}) | EMPTY_NAMES


def op_bytes(graph: LayerGraph, op: Op) -> int:
    """Bytes that the op reads and writes in the device's memory."""
    if op_leaf(op) in FREE:
        return 0
    written = sum(graph.buffers[b].base.nbytes for b in op.outputs if b is not None)
    written += sum(view_bytes(view) for view, _ in op.mutates)
    unread = [view for view, after in op.mutates if after in op.overwrites]
    if op_leaf(op) in ("addmm", "baddbmm") and _argument(op, "beta") == 0:
        unread.append(_tensor(op, "self"))
    operands = [v for v in dict.fromkeys(op.views()) if v not in unread]
    if op_leaf(op) in LOOKUPS and operands:
        # Of the table, as much is read as is written.
        return 2 * written + sum(view_bytes(v) for v in operands[1:])
    parameters = sum(graph.buffers[b].base.nbytes for b in op.uses)
    return sum(view_bytes(v) for v in operands) + parameters + written


# ---- collectives ----


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


# Of the bytes of a collective's larger side, the part that one rank sends.
_SENT: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "reduce": lambda ranks: 2 * _ring(ranks),
        "gather": _ring,
        "one": lambda ranks: 1.0 if ranks > 1 else 0.0,
    }
)


def collective_bytes(graph: LayerGraph, op: Op, ranks: int) -> float:
    """Bytes that one rank sends in the collective, by the module's formulas. ``ranks`` serves where the op's sizes
    do not tell how many take part."""
    if op_leaf(op) in FREE:
        return 0.0
    written = [view for view, _ in op.mutates]
    results = sum(v.nbytes for v in written) + sum(graph.buffers[b].base.nbytes for b in op.outputs if b is not None)
    inputs = sum(v.nbytes for v in views_in(op.args) if v not in written) or results  # in place: both
    larger, smaller = max(inputs, results), min(inputs, results)
    kind = _kind(op_leaf(op))
    if kind == "gather" and larger > smaller > 0:
        ranks = larger // smaller
    return _SENT[kind](ranks) * larger


def _kind(leaf: str) -> str:
    plain = leaf.replace("_", "")  # all_reduce, allreduce_, _allgather_base_, all_gather_into_tensor
    if plain.startswith("allreduce"):
        return "reduce"
    if plain.startswith(("allgather", "reducescatter", "alltoall")):
        return "gather"
    return "one"
