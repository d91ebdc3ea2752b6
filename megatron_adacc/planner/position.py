"""What is alive beside the held bytes while a layer runs, and where in the stage a layer stands.

The backward pass takes the layers last to first; each, when it is done, has freed what it held and left its gradients.
Let e_l be the extra bytes of layer l, alive beyond the held ones while its backward (or forward) runs, and after_l the
held bytes of one micro-batch in the layers behind l of its chunk, less what these have left. Then (4) is

    fixed + beside + sum of alive * held + lead <= limit,    lead = max(transient, max over l of (e_l - after_l))

Order. Among the layers of a class, which have left the same, let b'_l be what l holds less what it leaves. Then lead is
smallest if in the order of execution first stand those with b' < 0, by ascending e + b', then those with b' >= 0, by
descending e. Proof by exchange: let i stand directly before j, and let A be after_j. Their part of lead is
max(e_i - b'_j, e_j) - A, exchanged it is max(e_j - b'_i, e_i) - A, and no other layer sees a change. It is not more:
  b'_i, b'_j >= 0, e_i < e_j: the first is e_j, since e_i - b'_j < e_j, and the second is not more.
  b'_i, b'_j < 0, e_i + b'_i > e_j + b'_j: e_i - b'_j is more than e_j - b'_i, and more than e_i.
  b'_i >= 0 > b'_j: e_i - b'_j is more than e_i, and e_j not less than e_j - b'_i.
Where nothing is left this is descending e: a stage keeps much in its last layers and recomputes in its first.

Search. The cheapest flow with floors in place of extra bytes (planner/ends.py) is a bound for all plans. Its plan is
placed and counted with its true extra bytes, and only that is believed. Where a layer before those that were looked at
apart is above the limit, it is looked at apart too. Where one of these is, it needs more than its floor: then the
layers apart get one of some dozens of plans of which it is known what they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_adacc.planner import lexicographic
from megatron_adacc.planner.ends import Ends, any_plan, one_of
from megatron_adacc.planner.floors import Floor
from megatron_adacc.planner.frontier import LayerPaths
from megatron_adacc.planner.problem import Problem
from megatron_adacc.planner.program import Answer
from megatron_adacc.planner.solution import Extra, LayerAnswer, needs

# Of the last layers of a chunk so many are looked at apart at most.
MOST_APART = 3
# So often the flow is solved again where its plan does not fit.
_ATTEMPTS = 4
# So often a plan of the same cost and a smaller peak is looked for.
_LIGHTER = 3


class Remembered:
    """``extra``, asked once for each plan."""

    def __init__(self, problem: Problem, extra: Extra) -> None:
        self._sites = [[buffer.site for buffer in layer.buffers] for layer in problem.classes]
        self._extra = extra
        self._known: dict[tuple[int, tuple[str, ...]], int] = {}

    def __call__(self, class_index: int, actions: Mapping[str, str]) -> int:
        key = (class_index, tuple(actions[site] for site in self._sites[class_index]))
        if key not in self._known:
            self._known[key] = max(0, self._extra(class_index, actions))
        return self._known[key]

    def known(self, class_index: int) -> tuple[list[dict[str, str]], list[int]]:
        """The plans of a class that were asked for, and their extra bytes."""
        sites = self._sites[class_index]
        found = {key: extra for (index, key), extra in self._known.items() if index == class_index}
        return [dict(zip(sites, key, strict=True)) for key in found], list(found.values())


def placed(problem: Problem, layers: Sequence[LayerAnswer], extra: Extra) -> tuple[LayerAnswer, ...]:
    """The layers in the order of execution, with their extra bytes; those of a class as the module's text says."""
    of_class: dict[int, list[LayerAnswer]] = {}
    for answer in layers:
        index = answer.class_index
        of_class.setdefault(index, []).append(replace(answer, extra_bytes=extra(index, answer.actions)))

    def key(answer: LayerAnswer) -> tuple[float, ...]:
        stays = answer.outcome.held_bytes - problem.classes[answer.class_index].left_bytes
        order = (0, answer.extra_bytes + stays) if stays < 0 else (1, -answer.extra_bytes)
        return (*order, answer.outcome.held_bytes, -answer.outcome.cost_us)

    sorted_ = {index: iter(sorted(own, key=key)) for index, own in of_class.items()}
    return tuple(next(sorted_[index]) for index in problem.sequence)


class Search:
    """The best plan that was found with its true extra bytes, and a bound for all.

    ``layers``: in the order of execution, empty if none were found that fit; ``units``: their cost on the grid;
    ``bound``: of the flow with floors, than which no plan is cheaper."""

    def __init__(
        self, problem: Problem, paths: Sequence[LayerPaths], extra: Remembered, floors: Sequence[Sequence[Floor]],
        deadline: float,
    ) -> None:  # fmt: skip
        self._problem, self._paths, self._extra = problem, paths, extra
        self._deadline = deadline
        self._lengths = {layer.chunk: 1 for layer in problem.classes}
        self._floors = floors
        self.bound = Answer("unknown")
        self.layers: tuple[LayerAnswer, ...] = ()
        self.units = 0
        self.peak_bytes = 0

    def among_all(self) -> None:
        """The cheapest flow with floors, its bound, and its plan where that fits."""
        problem = self._problem
        ends = [any_plan(*own) for own in zip(problem.classes, self._paths, self._floors, strict=True)]
        for _ in range(_ATTEMPTS):
            self._program = Ends(problem, self._paths, ends, self._lengths, self._deadline)
            self.bound = self._program.cheapest()
            if not self.bound.found:
                return
            over = self._offer(self.bound)
            if not over or not self._look_at_more(over):
                return

    def among_known(self, complete: bool = False) -> None:
        """Give the layers apart only plans whose extra bytes have been asked for. ``complete``: these are all."""
        problem = self._problem
        costs, errors = lexicographic.cost_grid(problem), lexicographic.error_grid(problem)
        ends = [one_of(layer, *self._extra.known(i), costs, errors) for i, layer in enumerate(problem.classes)]
        less = 0
        for _ in range(_ATTEMPTS):
            self._program = Ends(problem, self._paths, ends, self._lengths, self._deadline)
            answer = self._program.cheapest(less)
            if complete and not less and answer.status != "unknown":
                self.bound = answer
            if not answer.found:
                return
            over = self._offer(answer)
            if not over:
                return
            # Of layers apart it is known what they need: one that was not must have come to stand there.
            if not self._look_at_more(over) and not self._look_at_more(over, 1):
                less += max(over.values())

    def make_lighter(self) -> None:
        """Of equal cost a smaller peak."""
        for _ in range(_LIGHTER if self.layers else 0):
            less = self._problem.limit_bytes - self.peak_bytes + 1
            answer = self._program.cheapest(less, self.units)
            before = self.peak_bytes
            if not answer.found or self._offer(answer) or self.peak_bytes >= before:
                return

    def _offer(self, answer: Answer) -> dict[int, int]:
        """Take the answer's layers if they are the best so far; gives by position how much they are above the limit."""
        layers = placed(self._problem, self._program.answers(answer), self._extra)
        rows = [(a.class_index, a.outcome.held_bytes, a.extra_bytes) for a in layers]
        limit, peak = self._problem.limit_bytes, 0
        over: dict[int, int] = {}
        for position, need in needs(self._problem, rows):
            peak = max(peak, need)
            if need > limit:
                assert position is not None, "(4) is in the program"
                over[position] = max(over.get(position, 0), need - limit)
        if not over and (not self.layers or (answer.objective, peak) < (self.units, self.peak_bytes)):
            self.layers, self.units, self.peak_bytes = layers, answer.objective, peak
        return over

    def _look_at_more(self, over: Mapping[int, int], by: int = 0) -> bool:
        """Look at the layers above the limit apart, and at ``by`` more; gives whether that are more than before."""
        problem, lengths = self._problem, dict(self._lengths)
        sequence = problem.sequence
        for position in over:
            chunk = problem.classes[sequence[position]].chunk
            length = sum(problem.classes[i].chunk == chunk for i in sequence[position:])
            whole = sum(problem.classes[i].chunk == chunk for i in sequence)
            if length <= MOST_APART:
                lengths[chunk] = min(whole, MOST_APART, max(lengths[chunk], length) + by)
        more, self._lengths = lengths != self._lengths, lengths
        return more
