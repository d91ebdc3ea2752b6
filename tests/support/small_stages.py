"""Small stages drawn by hypothesis, every plan of theirs, and extra bytes that follow no rule."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, Moment, OpItem, Problem
from megatron_adacc.planner.solution import COMPRESS, DROP, KEEP, RECOMPUTE, LayerAnswer, Violation, evaluate_layer

Extra = Callable[[int, Mapping[str, str]], int]


@st.composite
def layers(draw: st.DrawFn, chunk: int) -> LayerClass:
    """Up to three buffers, some made from the one before, some from an unsaved one."""
    buffers, ops = [], []
    for i in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 20))
        codecs = [
            CodecChoice("q", draw(st.integers(0, size)), draw(st.integers(0, 4)), draw(st.sampled_from([0, 0.25])))
        ]
        saved = draw(st.integers(0, 4)) > 0
        must_hold = saved and draw(st.integers(0, 4)) == 0
        buffers.append(BufferItem(f"b{i}", size, saved, tuple(codecs[: draw(st.integers(0, 1))]), must_hold))
        reads = (f"b{i - 1}",) if i and draw(st.booleans()) else ()
        ops.append(OpItem(f"o{i}", draw(st.integers(1, 9)), reads, (f"b{i}",), draw(st.integers(0, 4)) > 0))
    return LayerClass("", tuple(buffers), tuple(ops), 1, draw(st.integers(1, 3)), chunk, draw(st.integers(0, 12)))


@st.composite
def stages(draw: st.DrawFn) -> Problem:
    """Up to two classes and three layers, in any order, in one chunk or two."""
    chunks = draw(st.sampled_from([(0,), (0, 0), (0, 1)]))
    classes = [draw(layers(chunk)) for chunk in chunks]
    order = list(range(len(classes)))
    order += [draw(st.sampled_from(order)) for _ in range(3 - len(order))]
    order = draw(st.permutations(order)) if chunks != (0, 1) else sorted(order)
    classes = [replace(one, count=order.count(i)) for i, one in enumerate(classes)]
    alive = st.tuples(*(st.integers(1, 3) for _ in classes))
    moments = draw(
        st.lists(st.builds(Moment, st.sampled_from(chunks), alive, st.integers(0, 5), st.booleans()), max_size=3)
    )
    return Problem(
        tuple(classes), 0, draw(st.integers(0, 5)), draw(st.sampled_from([None, 0.0, 0.25])), draw(st.integers(0, 40)),
        tuple(moments), tuple(order),
    )  # fmt: skip


def every_plan(problem: Problem, index: int, extra: Extra) -> list[LayerAnswer]:
    """All that hold nothing that nobody asks for."""
    layer, found = problem.classes[index], []
    options = [[KEEP, RECOMPUTE, DROP, *(COMPRESS + c.name for c in b.codecs)] for b in layer.buffers]
    for choice in itertools.product(*options):
        actions = dict(zip((b.site for b in layer.buffers), choice, strict=True))
        try:
            outcome = evaluate_layer(layer, actions)
        except Violation:
            continue
        read = {site for op in layer.ops if op.name in outcome.runs for site in op.reads}
        idle = {b.site for b in layer.buffers if not b.saved and not b.must_hold} - read
        if all(actions[site] == DROP for site in idle):
            found.append(LayerAnswer(index, actions, outcome, extra(index, actions)))
    return found


def any_extra(numbers: Sequence[int]) -> Extra:
    """Bytes that follow no rule: each plan of a class has its own number."""

    def extra(index: int, actions: Mapping[str, str]) -> int:
        digits = [[KEEP, RECOMPUTE, DROP, COMPRESS + "q"].index(actions[site]) for site in sorted(actions)]
        place = sum(digit * 4**i for i, digit in enumerate(digits)) + 7 * index
        return numbers[place % len(numbers)]

    return extra


def every_stage(problem: Problem, extra: Extra) -> list[tuple[LayerAnswer, ...]]:
    """Every plan of every layer, within the error budget."""
    by_class = [every_plan(problem, i, extra) for i in range(len(problem.classes))]
    return [
        chosen
        for chosen in itertools.product(*(by_class[i] for i in problem.sequence))
        if problem.error_budget is None or sum(a.outcome.error for a in chosen) <= problem.error_budget
    ]
