"""The steps at which the monitor looks."""

import json

import pytest

from megatron_adacc.adaptive.schedule import Schedule
from megatron_adacc.errors import UserError


def checks(schedule: Schedule, steps: int, changes: tuple[int, ...] = ()) -> tuple[list[int], Schedule]:
    """The steps that are checked, of which ``changes`` find something."""
    found = []
    for step in range(1, steps + 1):
        if schedule.due(step):
            found.append(step)
        schedule = schedule.after(step, step in changes)
    return found, schedule


def test_intervals_double_up_to_the_largest():
    assert checks(Schedule.start(1, 64), 256)[0] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]
    assert checks(Schedule.start(3, 10), 44)[0] == [3, 6, 12, 22, 32, 42]
    assert checks(Schedule.start(5, 5), 20)[0] == [5, 10, 15, 20]


def test_a_change_takes_the_interval_back_to_the_least():
    found, schedule = checks(Schedule.start(1, 64), 80, changes=(32,))
    assert found == [1, 2, 4, 8, 16, 32, 33, 34, 36, 40, 48, 64]
    assert schedule.next_check == 96


def test_a_change_between_checks_does_too():
    assert checks(Schedule.start(1, 64), 50, changes=(40,))[0] == [1, 2, 4, 8, 16, 32, 41, 42, 44, 48]


def test_a_state_of_builtins_goes_on_where_it_was():
    _, at_20 = checks(Schedule.start(1, 64), 20)
    state = json.loads(json.dumps(at_20.to_data()))
    assert state == {"interval": 32, "next_check": 32}
    assert Schedule.start(1, 64).from_data(state) == at_20
    assert Schedule.start(1, 8).from_data(state).interval == 8


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4)])
def test_intervals_that_are_none(least, most):
    with pytest.raises(UserError, match=f"min_interval {least} and max_interval {most} have to be at least 1"):
        Schedule.start(least, most)


@pytest.mark.parametrize("state", [{}, {"interval": 1}, {"interval": "x", "next_check": 2}])
def test_a_state_that_is_none(state):
    with pytest.raises(UserError, match="The state of a schedule has the numbers interval and next_check"):
        Schedule.start(1, 4).from_data(state)
