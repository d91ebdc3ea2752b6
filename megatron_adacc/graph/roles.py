"""Roles of buffers, found from what produces and consumes them, never from module names.

Two relations are walked: ``operand`` (a matrix product reads this buffer at this place) and ``pointwise``
(the result is the same quantity, scaled, masked, copied or cast). A buffer takes the first role that fits,
in the order of :func:`_role`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megatron_adacc.graph.model import Buffer, LayerGraph, Op, Origin, Role, View

NORMS = frozenset(
    {
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
        "_fused_rms_norm", "rms_norm", "cudnn_batch_norm",
    }
)  # fmt: skip
SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2)}
FUSED_ATTENTION = "_scaled_dot_product"
SAME_QUANTITY = frozenset(
    {
        "mul", "mul_", "div", "div_", "clone", "copy_", "_to_copy", "masked_fill", "masked_fill_", "add",
        "add_", "where", "native_dropout", "native_dropout_backward", "_unsafe_view", "constant_pad_nd",
    }
)  # fmt: skip
MOVES = frozenset({"clone", "copy_", "_to_copy", "_unsafe_view", "cat", "index_select", "repeat"})
REDUCTIONS = frozenset({"mean", "var", "var_mean", "rsqrt", "logsumexp", "amax", "sum"})
RANDOM = frozenset({"bernoulli_", "bernoulli", "native_dropout", "_fused_dropout", "rand_like", "rand"})


def op_leaf(op: Op) -> str:
    """``mm`` for ``aten.mm.default``; the whole target for what is no op of a library."""
    parts = op.target.split(".")
    return parts[1] if len(parts) == 3 and " " not in op.target else op.target


def with_roles(graph: LayerGraph) -> LayerGraph:
    """The graph with a role for each of its buffers."""
    finder = _Finder(graph)
    return replace(graph, roles=tuple(finder.role(b) for b in graph.buffers))


class _Finder:
    def __init__(self, graph: LayerGraph) -> None:
        self.graph = graph
        self.readers: dict[int, list[Op]] = defaultdict(list)
        for op in graph.ops:
            for index in op.reads:
                self.readers[index].append(op)
        self.probabilities = self._probabilities()
        self.masks = self._masks()
        self.qkv = self._query_key_value()

    def writer(self, index: int) -> Op | None:
        writer = self.graph.buffers[index].writer
        return None if writer is None else self.graph.ops[writer]

    def role(self, buffer: Buffer) -> Role:
        """The first of these that fits."""
        index = buffer.index
        if buffer.origin in (Origin.PARAMETER, Origin.MODULE_BUFFER, Origin.ATTRIBUTE, Origin.CONSTANT):
            return Role.PARAMETER if buffer.origin == Origin.PARAMETER else Role.OTHER
        if index in self.masks:
            return Role.DROPOUT_MASK
        if index in self.probabilities:
            return Role.ATTENTION_PROBABILITIES
        if self._is_statistics(buffer):
            return Role.STATISTICS
        if index in self.qkv:
            return Role.QUERY_KEY_VALUE
        if self._is_norm_output(index):
            return Role.NORM_OUTPUT
        if self._is_linear_input(index):
            return Role.LINEAR_INPUT
        if self._is_residual(buffer):
            return Role.RESIDUAL
        return Role.OTHER

    def _descends(self, index: int, leaves: frozenset[str], through: frozenset[str], depth: int = 6) -> bool:
        """Whether the buffer was made by one of ``leaves``, followed by ops of ``through`` only."""
        op = self.writer(index)
        if op is None or depth == 0:
            return False
        if op_leaf(op) in leaves:
            return True
        if op_leaf(op) not in through:
            return False
        return any(self._descends(i, leaves, through, depth - 1) for i in op.reads)

    def _probabilities(self) -> set[int]:
        found = set()
        for buffer in self.graph.buffers:
            if buffer.origin == Origin.OP and len(buffer.base.size) >= 2 and self._descends(
                buffer.index, SOFTMAX, SAME_QUANTITY
            ):  # fmt: skip
                found.add(buffer.index)
        return found

    def _masks(self) -> set[int]:
        """Results of random ops that scale something, with their later in-place states."""
        found: set[int] = set()
        for op in self.graph.ops:
            leaf = op_leaf(op)
            if leaf in RANDOM and op.barrier is not None:
                found.update(op.writes if leaf != "native_dropout" else [b for b in op.outputs[1:] if b is not None])
            elif leaf in ("div_", "mul_", "lt", "ge", "gt", "le", "div", "_to_copy") and any(
                b in found for b in op.reads
            ):
                others = [b for b in op.reads if b not in found]
                if not others:
                    found.update(op.writes)
        return found

    def _product_operands(self, op: Op) -> tuple[View, ...]:
        positions = PRODUCTS.get(op_leaf(op), ())
        return tuple(a for i in positions if isinstance(a := op.args[i], View))

    def _query_key_value(self) -> set[int]:
        found: set[int] = set()
        for op in self.graph.ops:
            leaf = op_leaf(op)
            if leaf.startswith(FUSED_ATTENTION):
                found.update(a.buffer for a in op.args[:3] if isinstance(a, View))
                continue
            operands = [v.buffer for v in self._product_operands(op)]
            activations = [b for b in operands if self.graph.is_activation(b)]
            if len(activations) != 2:
                continue
            left, right = activations
            if left in self.probabilities:
                found.add(right)
            elif any(self._reaches_softmax(b) for b in op.writes):
                found.update((left, right))
        found |= {s for b in found for s in self._copied_from(b)}
        return {b for b in found if b not in self.probabilities and b not in self.masks}

    def _copied_from(self, index: int, depth: int = 4) -> set[int]:
        """Buffers whose elements ``index`` holds in another order, scale or type."""
        op = self.writer(index)
        if op is None or depth == 0 or op_leaf(op) not in MOVES | {"mul", "div"}:
            return set()
        sources = {b for b in op.reads if self.graph.buffers[b].origin == Origin.OP}
        return sources.union(*(self._copied_from(b, depth - 1) for b in sources)) if sources else set()

    def _reaches_softmax(self, index: int, depth: int = 6) -> bool:
        if depth == 0:
            return False
        for op in self.readers[index]:
            if op_leaf(op) in SOFTMAX:
                return True
            if op_leaf(op) in SAME_QUANTITY and any(self._reaches_softmax(b, depth - 1) for b in op.writes):
                return True
        return False

    def _is_statistics(self, buffer: Buffer) -> bool:
        op = self.writer(buffer.index)
        if op is None:
            return False
        leaf = op_leaf(op)
        if leaf in NORMS or leaf.startswith(FUSED_ATTENTION):
            return bool(op.outputs) and op.outputs[0] != buffer.index
        size = buffer.base.size
        return leaf in REDUCTIONS and (not size or size[-1] == 1)

    def _is_norm_output(self, index: int) -> bool:
        op = self.writer(index)
        if op is None:
            return False
        leaf = op_leaf(op)
        if leaf in NORMS:
            return op.outputs[0] == index
        if leaf in ("mul", "add", "_to_copy"):
            return self._descends(index, frozenset({"rsqrt"}), frozenset({"mul", "add", "_to_copy"}), 4)
        return False

    def _is_linear_input(self, index: int) -> bool:
        for op in self.readers[index]:
            operands = self._product_operands(op)
            if any(v.buffer == index for v in operands) and any(
                self.graph.buffers[v.buffer].origin == Origin.PARAMETER or self._from_parameter(v.buffer)
                for v in operands
            ):
                return True
        return False

    def _from_parameter(self, index: int) -> bool:
        op = self.writer(index)
        return op is not None and op_leaf(op) == "_to_copy" and all(
            self.graph.buffers[b].origin == Origin.PARAMETER for b in op.reads
        )  # fmt: skip

    def _is_residual(self, buffer: Buffer) -> bool:
        if buffer.origin == Origin.INPUT:
            return True
        op = self.writer(buffer.index)
        if op is not None and op_leaf(op) == "_to_copy":
            # The sum of a fused kernel, computed in float32 and rounded.
            sources = [self.graph.buffers[b] for b in op.reads]
            return all(b.origin == Origin.OP and self._is_residual(b) for b in sources)
        if op is None or op_leaf(op) not in ("add", "add_"):
            return False
        operands = [v for v in op.args if isinstance(v, View)]
        return len(operands) == 2 and all(
            v.size == buffer.base.size and self.graph.is_activation(v.buffer) for v in operands
        )
