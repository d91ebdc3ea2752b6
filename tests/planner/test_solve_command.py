"""`adacc solve`: answers, tables, exit codes, and a sentence for each mistake in a file."""

import copy
import ctypes
import json

import pytest

from megatron_adacc import cli
from megatron_adacc.errors import UserError
from megatron_adacc.planner.problem import BufferItem, LayerClass, OpItem, Problem
from megatron_adacc.planner.problem_file import problem_from_json
from megatron_adacc.planner.validate import validate

EXAMPLE = {
    "limit_bytes": 25,
    "error_budget": None,
    "layers": 1,
    "in_flight": 1,
    "transient_bytes": 0,
    "buffers": [
        {"site": "a", "bytes": 10, "saved": True, "codecs": {"int4": {"bytes": 4, "us": 2, "error": 0}}},
        {"site": "b", "bytes": 20, "saved": True, "codecs": {"int4": {"bytes": 6, "us": 3, "error": 0}}},
        {"site": "c", "bytes": 30, "saved": True, "codecs": {"int4": {"bytes": 9, "us": 5, "error": 0}}},
        {"site": "t", "bytes": 5, "saved": False},
    ],
    "ops": [
        {"name": "make_a", "us": 9, "reads": [], "writes": ["a"], "replayable": True},
        {"name": "make_b", "us": 4, "reads": [], "writes": ["b"], "replayable": True},
        {"name": "make_c", "us": 12, "reads": ["weight"], "writes": ["c"], "replayable": True},
    ],
}


@pytest.fixture
def problem_file(tmp_path):
    """A function that writes the example, changed by what it is given, and gives the path."""

    def write(**changes):
        path = tmp_path / "problem.json"
        path.write_text(json.dumps(EXAMPLE | changes))
        return str(path)

    return write


def test_the_answer_as_json(problem_file, capsys):
    assert cli.main(["solve", problem_file(), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("solver_seconds") > 0
    assert found == {
        "status": "optimal",
        "cost_us": 8.0,
        "held_bytes": 25,
        "actions": {"a": "keep", "b": "compress:int4", "c": "compress:int4", "t": "drop"},
    }


def test_what_the_solver_prints_is_not_in_the_answer(problem_file, capfd, monkeypatch):
    from megatron_adacc.planner import stage

    honest = stage.solve_stage

    def talks(problem, **options):
        ctypes.CDLL(None).puts(b"a word from the solver")
        ctypes.CDLL(None).puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        return honest(problem, **options)

    monkeypatch.setattr(stage, "solve_stage", talks)
    assert cli.main(["solve", problem_file(), "--json", "-"]) == 0
    output = capfd.readouterr()
    assert json.loads(output.out)["cost_us"] == 8
    assert output.err == "a word from the solver\n"


def test_several_layers_have_a_list_of_actions(problem_file, capsys):
    assert cli.main(["solve", problem_file(layers=2, limit_bytes=111), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [actions["c"] for actions in found["actions"]] == ["keep", "keep"]
    assert sorted(actions["b"] for actions in found["actions"]) == ["compress:int4", "keep"]
    assert (found["cost_us"], found["held_bytes"]) == (3, 106)


def test_micro_batches_in_flight_and_transient_bytes_count(problem_file, capsys):
    problem = problem_file(in_flight=2, limit_bytes=2 * 25 + 7, transient_bytes=7)
    assert cli.main(["solve", problem, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["held_bytes"] == 50


def test_the_table_and_the_file(problem_file, tmp_path, capsys):
    target = tmp_path / "answer.json"
    assert cli.main(["solve", problem_file(layers=3, limit_bytes=60 + 60 + 25), "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert json.loads(target.read_text())["cost_us"] == 8
    rows = {line.split()[1]: line.split() for line in shown.splitlines() if line.startswith("│")}
    assert rows["c"][3] == "30"
    assert "site" in shown
    assert "optimal\ncost 8 us, held " in shown
    assert "of 145 bytes, solved in" in shown


def test_a_missing_folder_is_refused_before_anything_is_solved(tmp_path, capsys):
    target = tmp_path / "missing" / "answer.json"
    assert cli.main(["solve", str(tmp_path / "not-read.json"), "--json", str(target)]) == 2
    assert capsys.readouterr().err == (f"adacc solve: error: {target} cannot be written: its folder does not exist.\n")


def test_a_limit_that_is_too_low_exits_with_2_and_the_least_that_works(problem_file, capsys):
    held = [{"site": "a", "bytes": 10, "saved": True, "must_hold": True}]
    assert cli.main(["solve", problem_file(buffers=held, ops=[], limit_bytes=9), "--json", "-"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "adacc solve: error: No plan fits into limit_bytes 9: the least limit that works is 10 bytes.\n"
    )


def test_what_has_no_plan_at_any_limit_says_so(problem_file, capsys):
    lost = [{"site": "a", "bytes": 10, "saved": True, "storable": False}]
    assert cli.main(["solve", problem_file(buffers=lost, ops=[])]) == 2
    assert "No limit has a plan: something that autograd needs can neither be held" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_is_a_number_above_0(problem_file, capsys, seconds):
    assert cli.main(["solve", problem_file(), "--time-limit", seconds]) == 2
    assert "--time-limit must be a number of seconds above 0" in capsys.readouterr().err


def test_files_that_cannot_be_read_or_written(problem_file, tmp_path, capsys):
    assert cli.main(["solve", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read: No such file or directory." in capsys.readouterr().err
    (tmp_path / "latin.json").write_bytes(b'{"\xff')
    assert cli.main(["solve", str(tmp_path / "latin.json")]) == 2
    assert "latin.json must be text in UTF-8; byte 2 is not." in capsys.readouterr().err
    assert cli.main(["solve", problem_file(), "--json", str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written: it is a folder." in capsys.readouterr().err


# ---- mistakes, each with its sentence ----


def changed(*path_and_value):
    """The example with one value changed: keys and list places, then the value; ... removes it."""
    content = copy.deepcopy(EXAMPLE)
    *path, last, value = path_and_value
    place = content
    for key in path:
        place = place[key]
    if value is ...:
        del place[last]
    elif isinstance(place, list) and last == len(place):
        place.append(value)
    else:
        place[last] = value
    return content


A, OP = ("buffers", 0), ("ops", 0)
SENTENCES = [
    (["a list"], "The problem must be a JSON object, not"),
    (changed("limit_bytes", ...), "The problem has no limit_bytes, which it needs."),
    (changed("limit", 3), "The problem has 'limit', which is not known; it may have error_budget, buffers, ops"),
    (changed("limit_bytes", 1.5), "The problem: limit_bytes must be a whole number of bytes that is not neg"),
    (changed("limit_bytes", -1), "limit_bytes must be a whole number of bytes that is not negative, not -1"),
    (changed("limit_bytes", True), "limit_bytes must be a whole number of bytes that is not negative, not true"),
    (changed("limit_bytes", "25 GiB"), 'must be a whole number of bytes that is not negative, not "25 GiB"'),
    (changed("error_budget", -0.5), "The problem: error_budget must be a number that is not negative, not -0.5"),
    (changed("layers", 0), "The problem: layers must be a whole number of at least 1, not 0"),
    (changed("in_flight", "two"), 'The problem: in_flight must be a whole number of at least 1, not "two"'),
    (changed("buffers", {}), "The problem: buffers must be a list, not {}"),
    (changed("ops", ...), "The problem has no ops, which it needs."),
    (changed(*A, "a"), 'Entry 1 of buffers must be a JSON object, not "a"'),
    (changed(*A, "site", ...), "Entry 1 of buffers has no site, which it needs."),
    (changed(*A, "site", ""), "Entry 1 of buffers: site must be a name in quotes"),
    (changed(*A, "bytes", ...), "Buffer a has no bytes, which it needs."),
    (changed(*A, "saved", 1), "Buffer a: saved must be true or false, not 1."),
    (changed(*A, "size", 1), "Buffer a has 'size', which is not known; it may have site, bytes, saved, codecs"),
    (changed(*A, "codecs", ["int4"]), "Buffer a: codecs must be a JSON object"),
    (changed(*A, "codecs", "int4", "us", ...), "Codec int4 of buffer a has no us, which it needs."),
    (changed(*A, "codecs", "int4", "us", -2), "Codec int4 of buffer a: us must be a number that is not negative"),
    (changed(*A, "codecs", "", {"bytes": 1, "us": 1}), "The name of a codec of buffer a must be a name in quotes"),
    (changed(*A, "must_hold", "yes"), 'Buffer a: must_hold must be true or false, not "yes".'),
    (changed(*OP, "name", ...), "Entry 1 of ops has no name, which it needs."),
    (changed(*OP, "us", None), "Op make_a: us must be a number that is not negative, not null."),
    (changed(*OP, "us", 10**400), "Op make_a: us is too large for a number"),
    (changed(*OP, "us", 1e16), "Op make_a: us must be at most 1e+15, not 1e+16."),
    (changed(*OP, "reads", "b"), 'Op make_a: reads must be a list, not "b".'),
    (changed(*OP, "writes", [3]), "Op make_a: writes: an entry must be a name in quotes, not 3."),
    (changed(*OP, "flops", 1), "Op make_a has 'flops', which is not known; it may have name, us, reads, writes"),
    (changed(*A, "site", "b"), "Each buffer needs a name of its own, but b comes 2 times."),
    (changed(*OP, "name", "make_b"), "Each op needs a name of its own, but make_b comes 2 times."),
    (changed(*OP, "writes", ["z"]), "Op make_a writes z, which is not among the buffers."),
    (changed(*OP, "writes", ["a", "b"]), "Buffer b is written by make_a and by make_b; each state of a storage"),
    (changed(*OP, "reads", ["a"]), "An op must not depend on its own output; in a ring, or behind one: make_a."),
    (changed("buffers", 0, "bytes", 2**61), "is above what the planner counts"),
    (changed("buffers", 4, {"site": "m", "bytes": 1, "saved": True, "must_hold": True, "storable": False}),
     "Buffer m must be held and cannot be"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "sentence"), SENTENCES, ids=range(len(SENTENCES)))
def test_a_mistake_is_a_sentence(content, sentence):
    with pytest.raises(UserError) as raised:
        problem_from_json(json.dumps(content))
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "A problem must be JSON; this is not: Expecting property name"),
        ('{"limit_bytes": NaN}', "A problem's numbers must be finite, but NaN is among them."),
        ('{"limit_bytes": -Infinity}', "A problem's numbers must be finite, but -Infinity is among them."),
        ('{"layers": 1, "layers": 2}', "each name must stand once in its object, but 'layers' comes twice."),
        ("[" * 100_000, "A problem must be JSON"),
    ],
)
def test_text_that_is_no_problem(text, sentence):
    with pytest.raises(UserError, match=sentence):
        problem_from_json(text)


def test_a_number_beyond_floats_is_refused():
    text = json.dumps(EXAMPLE).replace('"us": 9,', '"us": 1e999,')
    with pytest.raises(UserError, match="Op make_a: us must be a number that is not negative, not Infinity"):
        problem_from_json(text)


def test_defaults():
    content = {"limit_bytes": 1, "buffers": [{"site": "a", "bytes": 1, "saved": True}],
               "ops": [{"name": "o", "us": 1, "reads": [], "writes": ["a"]}]}  # fmt: skip
    layer = LayerClass("", (BufferItem("a", 1, True),), (OpItem("o", 1.0, (), ("a",)),))
    assert problem_from_json(json.dumps(content)) == Problem((layer,), 1)


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (Problem((LayerClass("gpt", (), (), count=0),), 1), "The count of layer class gpt must be at least 1, not 0."),
        (Problem((LayerClass("", (), (), in_flight=0),), 1), "The in_flight must be at least 1, not 0."),
        (Problem((), 1, fixed_bytes=-1), "The problem's fixed_bytes must be a number that is not negative, not -1."),
        (
            Problem(tuple(LayerClass("", (), (), chunk=chunk) for chunk in (0, 1, 0)), 1),
            "Layer classes of one chunk must stand together, but chunk 0 comes twice.",
        ),
        (
            Problem((LayerClass("", (), (OpItem("o", float("nan"), (), ()),)),), 1),
            "Op o: us must be a number that is not negative, not nan.",
        ),
    ],
)
def test_a_problem_made_in_python_is_checked_too(problem, sentence):
    with pytest.raises(UserError) as raised:
        validate(problem)
    assert str(raised.value) == sentence
