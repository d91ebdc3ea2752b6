"""Plans as data: JSON and back, lookup by layer, class and sites, what is lossless."""

import sys
from pathlib import Path

import pytest

from megatron_adacc.errors import UserError
from megatron_adacc.planner import Compress, Keep, LayerPlan, Plan, Recompute

GENERAL = LayerPlan("aaaa", (("x/mm.0", Recompute()), ("y/div_.0", Compress("bitmask"))))
SPECIAL = LayerPlan("aaaa", (("x/mm.0", Compress("group_int4", (("group_size", 64),))),), layer=3)
PLAN = Plan((GENERAL, SPECIAL), "mixed", (("made_for", "two layers"),))


def test_json_gives_the_plan_back(tmp_path: Path) -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_a_layers_own_plan_comes_before_its_class() -> None:
    sites = ["x/mm.0", "y/div_.0", "z/add.0"]
    assert PLAN.find("aaaa", sites, 3) is SPECIAL
    assert PLAN.find("aaaa", sites, 2) is GENERAL


def test_another_shape_of_the_class_is_found_by_its_sites() -> None:
    assert PLAN.find("bbbb", ["x/mm.0", "y/div_.0"], 0) is GENERAL
    assert PLAN.find("bbbb", ["x/mm.0", "y/div_.0"], 3) is SPECIAL
    assert PLAN.find("bbbb", ["y/div_.0"], 0) is None


def test_a_site_that_is_not_named_is_kept() -> None:
    assert GENERAL.action("x/mm.0") == Recompute()
    assert GENERAL.action("elsewhere") == Keep()


def test_lossless() -> None:
    assert GENERAL.lossless
    assert not SPECIAL.lossless
    assert not PLAN.lossless
    assert Plan((GENERAL,)).lossless


def test_printed() -> None:
    assert str(PLAN).splitlines() == [
        "plan mixed: 2 layer plans, lossy",
        "  aaaa (all layers)",
        "    x/mm.0: recompute",
        "    y/div_.0: compress(bitmask)",
        "  aaaa (layer 3)",
        "    x/mm.0: compress(group_int4)",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not json", "A plan file must hold JSON; this one does not"),
        ("[]", "A plan file must say format 1"),
        ('{"format": 7}', "A plan file must say format 1"),
        (
            '{"format": 1, "name": "p", "notes": {}, "layers": [{"fingerprint": "a", "layer": null, "actions": '
            '{"s": {"action": "shrink"}}}]}',
            "A plan's action must be keep, recompute or compress with a codec",
        ),
    ],
)
def test_what_is_no_plan_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Plan.from_json(text)


def test_planner_needs_no_torch() -> None:
    import subprocess

    script = "import sys, megatron_adacc.planner; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"
