"""The frontier of one layer: every plan of it that no other plan beats in bytes, microseconds and error at once.

A layer is a graph of ops; taken in reverse order, each op is a step of a shortest path with several weights.

    node   the buffers that ops running again have asked for so far, of those whose writer is still to come
    edge   what becomes of the buffers that the op writes. If a needed one is not held, the op runs again: the edge
           costs the op's microseconds and its target asks for what the op reads. needed = saved, or asked for
    (bytes, us, error) of a path: the sum over its edges. Paths are plans.

A buffer's readers come after its writer, so when an edge decides about a buffer it is known whether an op that reads
it runs: the cost of decoding it again is exact. A real layer is narrow, so there are few nodes: a saved buffer is
needed whether asked for or not, and is remembered only where decoding it again costs something.

The frontier is found by carrying the plans of each node, those that are beaten at the same node left out. With
weights (price of a byte, price of an error) a path has a *reduced cost*; exact lower bounds for the rest of a path
let :func:`enumerate_plans` carry only what can end within a given reduced cost.

Costs are whole multiples of a unit (`Grid`), so that sums are exact and equal plans are seen to be equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_adacc.planner.dominance import Ints, undominated
from megatron_adacc.planner.grid import Grid
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem
from megatron_adacc.planner.solution import COMPRESS, DROP, KEEP, RECOMPUTE
from megatron_adacc.planner.validate import in_order

# Nodes after one op. Real layers have some dozens.
MOST_NODES = 2000

# What a buffer may get: action, bytes, cost, error.
_Option = tuple[str, int, int, int]


@dataclass(frozen=True)
class Stage:
    """One op, or one buffer that no op writes: the edges from the nodes before it, sorted by source node.

    ``first[n] : first[n + 1]`` are the edges of node n. ``holds`` gives for each edge (buffer index, action)."""

    first: Ints
    target: Ints
    nbytes: Ints
    cost: Ints
    error: Ints
    holds: tuple[tuple[tuple[int, str], ...], ...]


@dataclass(frozen=True)
class Points:
    """Plans of one layer: bytes, cost (units), error (units) of each, and the actions by site."""

    nbytes: Ints
    cost: Ints
    error: Ints
    actions: tuple[dict[str, str], ...]

    def __len__(self) -> int:
        return len(self.nbytes)

    def subset(self, index: Ints) -> Points:
        """The plans ``index``, in that order."""
        actions = tuple(self.actions[i] for i in index)
        return Points(self.nbytes[index], self.cost[index], self.error[index], actions)


class TooWide(Exception):
    """A layer's graph of plans has more nodes than can be handled."""


class PlanGraph:
    """Plans of one layer as the paths through ``stages``."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages

    def values(self, byte_price: float, error_price: float) -> list[NDArray[np.float64]]:
        """Of each stage the reduced costs of its edges: cost + byte_price * bytes + error_price * error."""
        return [stage.cost + byte_price * stage.nbytes + error_price * stage.error for stage in self.stages]

    def bounds(self, values: Sequence[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
        """For each stage and node the least value of the rest of a path; the last entry is the end. The first entry's
        only value is that of the cheapest plan. ``values``: of the edges of each stage."""
        rest = [np.zeros(1)]
        for stage, own in zip(reversed(self.stages), reversed(values), strict=True):
            value = own + (rest[-1][stage.target] if len(stage.target) else 0.0)
            nodes = len(stage.first) - 1
            least = np.full(nodes, np.inf)
            np.minimum.at(least, np.repeat(np.arange(nodes), np.diff(stage.first)), value)
            rest.append(least)
        return rest[::-1]

    def detours(self, values: Sequence[NDArray[np.float64]]) -> tuple[float, list[NDArray[np.float64]]]:
        """The least value of a plan, and for each stage and edge by how much the cheapest plan through the edge is
        above it; infinite where there is no plan."""
        rest = self.bounds(values)
        cheapest = float(rest[0][0])
        if not np.isfinite(cheapest):
            return cheapest, [np.full(len(stage.target), np.inf) for stage in self.stages]
        so_far = np.zeros(1)
        above = []
        for stage, own, behind in zip(self.stages, values, rest[1:], strict=True):
            arrived = so_far[np.repeat(np.arange(len(so_far)), np.diff(stage.first))] + own
            above.append(arrived + behind[stage.target] - cheapest)
            so_far = np.full(len(behind), np.inf)
            np.minimum.at(so_far, stage.target, arrived)
        return cheapest, above


class LayerPaths(PlanGraph):
    """The graph of a layer's plans. ``error_grid``: None to leave errors out of account. ``lossless``: codecs with an
    error are left out. Raises TooWide."""

    def __init__(self, layer: LayerClass, cost_grid: Grid, error_grid: Grid | None, lossless: bool = False) -> None:
        self.layer = layer
        self._cost_grid, self._error_grid, self._lossless = cost_grid, error_grid, lossless
        self._index = {buffer.site: i for i, buffer in enumerate(layer.buffers)}
        self._remembered = 0
        for i, buffer in enumerate(layer.buffers):
            if not buffer.saved or any(c.again_us for c in buffer.codecs):
                self._remembered |= 1 << i
        super().__init__([])
        written = {site for op in layer.ops for site in op.writes}
        steps: list[tuple[OpItem | None, tuple[str, ...]]] = [(op, op.writes) for op in reversed(in_order(layer))]
        steps += [(None, (b.site,)) for b in layer.buffers if b.site not in written]
        nodes = {0: 0}
        for op, sites in steps:
            nodes = self._add_stage(nodes, op, [self._index[s] for s in sites])
            if len(nodes) > MOST_NODES:
                raise TooWide(f"{len(nodes)} sets of buffers may be asked for at once")

    def lossless(self) -> LayerPaths:
        """The same without the codecs that have an error."""
        return LayerPaths(self.layer, self._cost_grid, self._error_grid, lossless=True)

    def _options(self, buffer: BufferItem, needed: bool, asked: bool) -> list[_Option]:
        options: list[_Option] = []
        if not buffer.must_hold:
            options.append((RECOMPUTE if buffer.saved else DROP, 0, 0, 0))
        if buffer.storable and (needed or buffer.must_hold):
            options.append((KEEP, buffer.bytes, 0, 0))
            for codec in buffer.codecs:
                if codec.error and self._lossless:
                    continue
                us = codec.us + (codec.again_us if asked else 0.0)
                cost = self._cost_grid.units(us)
                error = self._error_grid.units(codec.error) if self._error_grid else 0
                options.append((COMPRESS + codec.name, codec.bytes, cost, error))
        return options

    def _add_stage(self, nodes: dict[int, int], op: OpItem | None, writes: list[int]) -> dict[int, int]:
        """Add the edges of one op (None: of a buffer that no op writes). ``nodes``: asked-for sets -> node."""
        mine = sum(1 << i for i in writes)
        run_cost = self._cost_grid.units(op.us) if op else 0
        asks = 0
        for site in op.reads if op else ():
            asks |= 1 << self._index[site] if site in self._index else 0
        asks &= self._remembered
        targets: dict[int, int] = {}
        edges: list[list[tuple[int, int, int, int, tuple[tuple[int, str], ...]]]] = []
        for mask in nodes:
            best: dict[int, list[tuple[int, int, int, tuple[_Option, ...]]]] = {}
            needed = [self.layer.buffers[i].saved or bool(mask >> i & 1) for i in writes]
            options = [
                self._options(self.layer.buffers[i], need, bool(mask >> i & 1))
                for i, need in zip(writes, needed, strict=True)
            ]
            for choice in itertools.product(*options):
                runs = any(need and not _holds(pick[0]) for need, pick in zip(needed, choice, strict=True))
                if runs and (op is None or not op.replayable):
                    continue
                nbytes = sum(pick[1] for pick in choice)
                cost = sum(pick[2] for pick in choice) + (run_cost if runs else 0)
                error = sum(pick[3] for pick in choice)
                target = mask & ~mine | (asks if runs else 0)
                best.setdefault(target, []).append((nbytes, cost, error, choice))
            found = []
            for target, plans in best.items():
                plans.sort(key=lambda plan: plan[:3])
                node = targets.setdefault(target, len(targets))
                kept: list[tuple[int, int, tuple[_Option, ...]]] = []
                for nbytes, cost, error, choice in plans:
                    if not any(c <= cost and e <= error and _stands_for(other, choice) for c, e, other in kept):
                        kept.append((cost, error, choice))
                        holds = tuple((i, pick[0]) for i, pick in zip(writes, choice, strict=True))
                        found.append((node, nbytes, cost, error, holds))
            edges.append(found)
        flat = [edge for found in edges for edge in found]
        edge_holds = tuple(edge[4] for edge in flat)
        numbers = np.array([edge[:4] for edge in flat], dtype=np.int64).reshape(-1, 4)
        first = np.cumsum([0, *(len(found) for found in edges)])
        self.stages.append(Stage(first, numbers[:, 0], numbers[:, 1], numbers[:, 2], numbers[:, 3], edge_holds))
        return targets


def _holds(action: str) -> bool:
    return action not in (RECOMPUTE, DROP)


def _stands_for(one: tuple[_Option, ...], other: tuple[_Option, ...]) -> bool:
    """Whether, buffer by buffer, the first never needs more: held, and while the layer runs (planner/floors.py)."""
    return all(
        a == b or (a[1] <= b[1] and (b[0] != KEEP or not a[0].startswith(COMPRESS)))
        for a, b in zip(one, other, strict=True)
    )


def enumerate_plans(
    paths: LayerPaths, byte_price: float = 0.0, error_price: float = 0.0, within: float = np.inf,
    most_error: int | None = None, most_plans: int = 2_000_000,
) -> Points | None:  # fmt: skip
    """The frontier, or of it the plans whose reduced cost is at most ``within``, sorted by bytes.

    ``most_error`` (units) leaves out plans above it. None when more than ``most_plans`` would be carried at once."""
    finite = np.isfinite(within)
    rest = paths.bounds(paths.values(byte_price, error_price)) if finite else []
    node = np.zeros(1, dtype=np.int64)
    nbytes, cost, error = (np.zeros(1, dtype=np.int64) for _ in range(3))
    history: list[tuple[Ints, Ints]] = []
    for position, stage in enumerate(paths.stages):
        degree = np.diff(stage.first)[node]
        parent = np.repeat(np.arange(len(node)), degree)
        if len(parent) > most_plans:
            return None
        offset = np.arange(len(parent)) - np.repeat(np.cumsum(degree) - degree, degree)
        edge = stage.first[node[parent]] + offset
        nbytes = nbytes[parent] + stage.nbytes[edge]
        cost = cost[parent] + stage.cost[edge]
        error = error[parent] + stage.error[edge]
        node = stage.target[edge]
        alive = np.ones(len(node), dtype=bool)
        if finite:
            alive &= cost + byte_price * nbytes + error_price * error + rest[position + 1][node] <= within
        if most_error is not None:
            alive &= error <= most_error
        here = np.flatnonzero(alive)
        index = here[undominated(node[here], [nbytes[here], cost[here], error[here]])]
        node, nbytes, cost, error = node[index], nbytes[index], cost[index], error[index]
        history.append((parent[index], edge[index]))
    index = undominated(node, [nbytes, cost, error])  # one node is left: they come sorted by bytes
    actions = tuple(_actions(paths, history, int(i)) for i in index)
    return Points(nbytes[index], cost[index], error[index], actions)


def _actions(paths: LayerPaths, history: list[tuple[Ints, Ints]], end: int) -> dict[str, str]:
    """The actions of the path that ends in place ``end`` of the last stage."""
    chosen: dict[int, str] = {}
    for stage, (parent, edge) in zip(reversed(paths.stages), reversed(history), strict=True):
        chosen.update(stage.holds[edge[end]])
        end = int(parent[end])
    return {buffer.site: chosen[i] for i, buffer in enumerate(paths.layer.buffers)}
