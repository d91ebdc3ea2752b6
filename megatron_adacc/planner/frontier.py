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
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal

import numpy as np
from numpy.typing import NDArray

from megatron_adacc.errors import UserError
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem
from megatron_adacc.planner.solution import COMPRESS, DROP, KEEP, RECOMPUTE

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """Microseconds or errors as whole numbers of 10**-digits."""

    digits: int
    round_up: bool = False

    @staticmethod
    def fitting(values: list[float], largest_sum: float, most: int, round_up: bool = False) -> Grid:
        """The coarsest grid on which all values are exact, if sums up to ``largest_sum`` stay within ``most`` units;
        otherwise the finest on which they do."""
        exact = max((-int(Decimal(repr(float(v))).normalize().as_tuple().exponent) for v in values if v), default=0)
        digits = max(exact, 0)
        while digits > -12 and largest_sum * 10.0**digits > most:
            digits -= 1
        return Grid(digits, round_up)

    def units(self, value: float) -> int:
        scaled = Decimal(repr(float(value))).scaleb(self.digits)
        return int(scaled.to_integral_value(ROUND_CEILING if self.round_up else ROUND_HALF_EVEN))

    def value(self, units: int) -> float:
        return float(Decimal(int(units)).scaleb(-self.digits))


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


def in_order(layer: LayerClass) -> tuple[OpItem, ...]:
    """The layer's ops so that each comes after the writers of what it reads. Raises UserError for a cycle."""
    writers = {site: op.name for op in layer.ops for site in op.writes}
    ops = {op.name: op for op in layer.ops}
    waiting = {op.name: {writers[r] for r in op.reads if r in writers} for op in layer.ops}
    readers: dict[str, list[str]] = {name: [] for name in ops}
    for name, sources in waiting.items():
        for source in sources:
            readers[source].append(name)
    ready = [name for name in ops if not waiting[name]]
    order: list[OpItem] = []
    for name in ready:
        order.append(ops[name])
        for reader in readers[name]:
            waiting[reader].discard(name)
            if not waiting[reader]:
                ready.append(reader)
    if len(order) < len(ops):
        stuck = sorted(name for name, sources in waiting.items() if sources)
        raise UserError(f"Ops must not depend on their own outputs, but {', '.join(stuck)} do, directly or in a ring.")
    return tuple(order)


class LayerPaths:
    """The graph of a layer's plans. ``lossless``: codecs with an error are left out."""

    def __init__(self, layer: LayerClass, cost_grid: Grid, error_grid: Grid, lossless: bool = False) -> None:
        self.layer = layer
        self._cost_grid, self._error_grid, self._lossless = cost_grid, error_grid, lossless
        self._index = {buffer.site: i for i, buffer in enumerate(layer.buffers)}
        self._remembered = 0
        for i, buffer in enumerate(layer.buffers):
            if not buffer.saved or any(c.again_us for c in buffer.codecs):
                self._remembered |= 1 << i
        self.stages: list[Stage] = []
        written = {site for op in layer.ops for site in op.writes}
        steps: list[tuple[OpItem | None, tuple[str, ...]]] = [(op, op.writes) for op in reversed(in_order(layer))]
        steps += [(None, (b.site,)) for b in layer.buffers if b.site not in written]
        nodes = {0: 0}
        for op, sites in steps:
            nodes = self._add_stage(nodes, op, [self._index[s] for s in sites])
        self.possible = bool(nodes)

    def _options(self, buffer: BufferItem, needed: bool, asked: bool) -> list[tuple[str, int, int, int]]:
        """(action, bytes, cost, error) that the buffer may get."""
        options: list[tuple[str, int, int, int]] = []
        if not buffer.must_hold:
            options.append((RECOMPUTE if buffer.saved else DROP, 0, 0, 0))
        if buffer.storable and (needed or buffer.must_hold):
            options.append((KEEP, buffer.bytes, 0, 0))
            for codec in buffer.codecs:
                if codec.error and self._lossless:
                    continue
                us = codec.us + (codec.again_us if asked else 0.0)
                cost, error = self._cost_grid.units(us), self._error_grid.units(codec.error)
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
            best: dict[int, list[tuple[int, int, int, tuple[tuple[int, str], ...]]]] = {}
            needed = [self.layer.buffers[i].saved or bool(mask >> i & 1) for i in writes]
            options = [
                self._options(self.layer.buffers[i], need, bool(mask >> i & 1))
                for i, need in zip(writes, needed, strict=True)
            ]
            for choice in itertools.product(*options):
                runs = any(need and not held_bytes_of(pick) for need, pick in zip(needed, choice, strict=True))
                if runs and (op is None or not op.replayable):
                    continue
                nbytes, cost, error = (sum(pick[k] for pick in choice) for k in (1, 2, 3))
                target = mask & ~mine | (asks if runs else 0)
                holds = tuple((i, pick[0]) for i, pick in zip(writes, choice, strict=True))
                best.setdefault(target, []).append((nbytes, cost + (run_cost if runs else 0), error, holds))
            found = []
            for target, plans in best.items():
                plans.sort(key=lambda plan: plan[:3])
                node = targets.setdefault(target, len(targets))
                kept: list[tuple[int, int, int]] = []
                for nbytes, cost, error, holds in plans:
                    if not any(c <= cost and e <= error for _, c, e in kept):
                        kept.append((nbytes, cost, error))
                        found.append((node, nbytes, cost, error, holds))
            edges.append(found)
        flat = [edge for found in edges for edge in found]
        columns = [np.array([edge[k] for edge in flat], dtype=np.int64) for k in range(4)]
        first = np.cumsum([0, *(len(found) for found in edges)])
        self.stages.append(Stage(first, *columns, tuple(edge[4] for edge in flat)))
        return targets

    def bounds(self, byte_price: float, error_price: float) -> list[NDArray[np.float64]]:
        """For each stage and node the least reduced cost cost + byte_price * bytes + error_price * error of the rest
        of a path; the last entry is the end. The first entry's only value is that of the cheapest plan."""
        rest = [np.zeros(1)]
        for stage in reversed(self.stages):
            weight = stage.cost + byte_price * stage.nbytes + error_price * stage.error
            value = weight + (rest[-1][stage.target] if len(stage.target) else 0.0)
            nodes = len(stage.first) - 1
            least = np.full(nodes, np.inf)
            np.minimum.at(least, np.repeat(np.arange(nodes), np.diff(stage.first)), value)
            rest.append(least)
        return rest[::-1]


def held_bytes_of(pick: tuple[str, int, int, int]) -> bool:
    """Whether the option holds the buffer."""
    return pick[0] not in (RECOMPUTE, DROP)


def undominated(nbytes: Ints, cost: Ints, error: Ints) -> Ints:
    """Indices, in order of bytes, of the points that no other is at most as large as in all three."""
    order = np.lexsort((error, cost, nbytes))
    if not len(order):
        return order
    if not error.any():
        sorted_cost = cost[order]
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = sorted_cost[1:] < np.minimum.accumulate(sorted_cost)[:-1]
        return order[keep]
    return order[_staircase(cost[order].tolist(), error[order].tolist())]


def _staircase(costs: list[int], errors: list[int]) -> list[int]:
    """Places of the points that no earlier one beats in cost and error. Kept as a staircase: costs rise, errors fall."""
    from bisect import bisect_left, bisect_right

    stair_cost: list[int] = []
    stair_error: list[int] = []  # negated, so that it rises too
    kept = []
    for place, (cost, error) in enumerate(zip(costs, errors, strict=True)):
        at = bisect_right(stair_cost, cost)
        if at and -stair_error[at - 1] <= error:
            continue
        kept.append(place)
        start = bisect_left(stair_cost, cost)
        end = start
        while end < len(stair_cost) and -stair_error[end] >= error:
            end += 1
        stair_cost[start:end] = [cost]
        stair_error[start:end] = [-error]
    return kept


def enumerate_plans(
    paths: LayerPaths, byte_price: float = 0.0, error_price: float = 0.0, within: float = np.inf,
    most_error: int | None = None, most_plans: int = 2_000_000,
) -> Points | None:  # fmt: skip
    """The frontier, or of it the plans whose reduced cost is at most ``within``, sorted by bytes.

    ``most_error`` (units) leaves out plans above it. None when more than ``most_plans`` would be carried at once."""
    finite = np.isfinite(within)
    rest = paths.bounds(byte_price, error_price) if finite else []
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
        nbytes, cost, error = nbytes[parent] + stage.nbytes[edge], cost[parent] + stage.cost[edge], error[parent] + stage.error[edge]  # fmt: skip
        node = stage.target[edge]
        alive = np.ones(len(node), dtype=bool)
        if finite:
            alive &= cost + byte_price * nbytes + error_price * error + rest[position + 1][node] <= within
        if most_error is not None:
            alive &= error <= most_error
        kept = [np.zeros(0, dtype=np.int64)]
        for n in np.unique(node[alive]):
            here = np.flatnonzero(alive & (node == n))
            kept.append(here[undominated(nbytes[here], cost[here], error[here])])
        index = np.concatenate(kept)
        node, nbytes, cost, error = node[index], nbytes[index], cost[index], error[index]
        history.append((parent[index], edge[index]))
    index = undominated(nbytes, cost, error)
    actions = tuple(_actions(paths, history, int(i)) for i in index)
    return Points(nbytes[index], cost[index], error[index], actions)


def _actions(paths: LayerPaths, history: list[tuple[Ints, Ints]], end: int) -> dict[str, str]:
    """The actions of the path that ends in place ``end`` of the last stage."""
    chosen: dict[int, str] = {}
    for stage, (parent, edge) in zip(reversed(paths.stages), reversed(history), strict=True):
        chosen.update(stage.holds[edge[end]])
        end = int(parent[end])
    return {buffer.site: chosen[i] for i, buffer in enumerate(paths.layer.buffers)}
