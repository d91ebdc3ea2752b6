"""Forwards in flight on each pipeline stage, against known values and a count by hand."""

import pytest

from megatron_adacc.cost.in_flight import Schedule, Step, heaviest, held_bytes, in_flight, moments, order
from megatron_adacc.errors import UserError


def every_stage(schedule: Schedule) -> list[int]:
    return [in_flight(schedule, stage) for stage in range(schedule.stages)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(1, 8), [1]),
        (Schedule(4, 8), [4, 3, 2, 1]),
        (Schedule(4, 2), [2, 2, 2, 1]),
        (Schedule(4, 1), [1, 1, 1, 1]),
        (Schedule(4, 8, chunks=2), [11, 9, 7, 5]),
        (Schedule(4, 4, chunks=2), [8, 8, 7, 5]),
        (Schedule(4, 8, chunks=2, group_size=8), [15, 13, 11, 9]),
        (Schedule(2, 4, chunks=3), [7, 5]),
    ],
)
def test_in_flight(schedule, expected):
    assert every_stage(schedule) == expected


def test_the_order_of_a_small_pipeline():
    def text(steps: tuple[Step, ...]) -> str:
        return " ".join(f"{'F' if step.forward else 'B'}{step.micro_batch}" for step in steps)

    assert text(order(Schedule(1, 2), 0)) == "F0 B0 F1 B1"
    assert text(order(Schedule(2, 3), 0)) == "F0 F1 B0 F2 B1 B2"
    assert text(order(Schedule(2, 3), 1)) == "F0 B0 F1 B1 F2 B2"
    assert text(order(Schedule(3, 1), 0)) == "F0 B0"


def test_the_order_of_an_interleaved_pipeline():
    steps = order(Schedule(2, 2, chunks=2), 1)
    assert [(step.forward, step.chunk, step.micro_batch) for step in steps] == [
        (True, 0, 0),
        (True, 0, 1),
        (True, 1, 0),
        (False, 1, 0),
        (True, 1, 1),
        (False, 1, 1),
        (False, 0, 0),
        (False, 0, 1),
    ]


def test_unequal_chunks_are_weighed():
    schedule = Schedule(4, 8, chunks=2)
    # 11 forwards are alive on the first stage; which chunk has most of them depends on the moment.
    assert {moment.alive for moment in moments(schedule, 0) if moment.forward} == {(7, 4), (8, 3)}
    assert heaviest(schedule, 0, (1, 0)) == (8, 3)
    assert heaviest(schedule, 0, (0, 1)) == (7, 4)
    assert held_bytes(schedule, 0, (10, 1)) == 83
    assert held_bytes(schedule, 0, (1, 10)) == 47
    # A sum of each chunk's own largest number would be too much: 8 + 4.
    assert held_bytes(schedule, 0, (1, 1)) == 11


def test_moments_know_what_runs():
    (forward, backward) = moments(Schedule(4, 8), 1)
    assert (forward.forward, forward.chunk, forward.alive) == (True, 0, (3,))
    assert (backward.forward, backward.chunk, backward.alive) == (False, 0, (3,))
    for moment in moments(Schedule(4, 8, chunks=2), 3):
        assert moment.alive[moment.chunk] >= 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"stages": 0}, "at least one of its stages, but 0 is given"),
        ({"micro_batches": -1}, "at least one of its micro_batches, but -1 is given"),
        ({"stages": 1, "chunks": 2, "micro_batches": 4}, "2 chunks need a pipeline of at least 2 stages"),
        ({"stages": 4, "chunks": 2, "micro_batches": 2}, "at least as many micro-batches in a step, but it has 2"),
        ({"stages": 4, "chunks": 2, "micro_batches": 8, "group_size": 3}, "but 3 is given"),
        ({"stages": 4, "chunks": 2, "micro_batches": 9, "group_size": 8}, "leave a last group of 1"),
    ],
)
def test_what_megatron_refuses(arguments, sentence):
    with pytest.raises(UserError) as caught:
        Schedule(**arguments)
    assert sentence in str(caught.value)


def test_other_mistakes():
    with pytest.raises(UserError, match="stages 0 to 3"):
        order(Schedule(4, 8), 4)
    with pytest.raises(UserError, match="1 weights are given for 2 chunks"):
        heaviest(Schedule(4, 8, chunks=2), 0, (1,))
