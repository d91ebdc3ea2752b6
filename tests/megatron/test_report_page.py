"""adacc report: the page of a run, its geometry, and what a browser draws of it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from megatron_adacc.cli import main
from megatron_adacc.megatron.report_page import COLOURS, page
from megatron_adacc.megatron.report_svg import Chart, Line, Scale, thinned

MIB = 2**20


def tensor(site, action, mib, held_mib):
    return {"site": site, "role": "other", "action": action, "bytes": int(mib * MIB), "held_bytes": int(held_mib * MIB)}


def layer(number, *tensors, rank=0):
    return {"stage": 0, "tensor_rank": rank, "layer": number, "tensors": list(tensors)}


def point(held, us):
    return {"held_bytes": held * MIB, "peak_bytes": 2 * held * MIB, "step_us": us}


REPORT = {
    "format": 1,
    "summary": {
        "strategy": "auto", "iterations": 40, "final_lm_loss": 2.5, "step_ms_median": 12.0, "held_bytes": 9 * MIB,
        "peak_bytes": 30 * MIB, "peak_rss_bytes": 1,
    },
    "device": "cpu <x86_64>",
    "world_size": 1,
    "run": {"num_layers": 2, "hidden_size": 8, "seq_length": 4, "micro_batch_size": 1, "dtype": "float32"},
    "layer_held_bytes": {"layer.1": 6 * MIB, "layer.2": 3 * MIB},
    "plan": [
        layer(1, tensor("a", "keep", 4, 4), tensor("b", "recompute", 4, 0), tensor("m<1>", "bitmask", 2, 0.25)),
        layer(2, tensor("a", "keep", 2, 2), tensor("c", "outlier_int4", 4, 1)),
        layer(1, tensor("a", "keep", 4, 4), rank=1),
    ],
    "gradient_errors": [
        {"stage": 0, "tensor_rank": 0, "step": step, "layer": n, "error": error, "cosine": 1.0}
        for step, n, error in ((10, 1, 0.01), (10, 2, 0.1), (20, 1, 0.02), (20, 2, 0.2))
    ],
    "frontiers": [
        {
            "stage": 0, "tensor_rank": 0, "unit": "held", "limit_bytes": 10 * MIB, "error_budget": 0.0,
            "points": [point(16, 100.0), point(9, 110.0), point(4, 150.0)], "chosen": point(9, 110.0),
            "none": point(16, 100.0), "full": point(2, 180.0),
        }
    ],
    "decisions": [
        {
            "stage": 0, "tensor_rank": 0, "step": 20, "why": ["a <reason>"], "changed": ["a: keep -> recompute"],
            "effect": "5.0 -> 6.0 ms", "plan": {"keep": 6 * MIB, "recompute": 4 * MIB},
        }
    ],
    "iterations": [
        {
            "iteration": i, "lm_loss": None if i == 5 else 4 - 1.5 * i / 40, "skipped_iterations": 0, "step_ms": 12.0,
            "held_bytes": 9 * MIB, "peak_bytes": 30 * MIB, "peak_rss_bytes": 1,
        }
        for i in range(1, 41)
    ],
}  # fmt: skip
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Shapes by the section they are in, and that every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.shapes, self.text, self.title = [], [], [], None
        self.section = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        given = dict(attributes)
        assert not {"src", "href", "onclick"} & given.keys()
        assert tag not in ("script", "link", "img", "iframe")
        if tag in ("rect", "path", "circle"):
            self.shapes.append((self.section, tag, given))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.section = data
        self.text.append(data)

    def rects(self, section, *classes):
        return [
            given for where, tag, given in self.shapes
            if (where, tag) == (section, "rect") and set(classes) <= set(given.get("class", "").split())
        ]  # fmt: skip

    def widths(self, style, *classes):
        return [float(r["width"]) for r in self.rects("The plan", style, *classes) if r["height"] == "20"]


@pytest.fixture(scope="module")
def drawn():
    return Page(page(REPORT))


def test_blocks_have_the_bytes_of_their_tensors(drawn):
    unit = drawn.widths("keep")[0] / 4  # px of a MiB
    assert unit == pytest.approx((1000 - 92 - 4) / 10, abs=0.01)  # layer 1, the largest, has 10
    assert drawn.widths("keep") == pytest.approx([4 * unit, 2 * unit], abs=0.02)  # the second rank's is not repeated
    assert drawn.widths("recompute", "whole") == pytest.approx([4 * unit], abs=0.02)
    assert drawn.widths("hatch") == pytest.approx([4 * unit], abs=0.02)
    assert drawn.widths("bitmask", "light") == pytest.approx([2 * unit], abs=0.02)
    assert drawn.widths("bitmask", "held") == pytest.approx([0.25 * unit], abs=0.02)
    assert drawn.widths("codec0", "held") == pytest.approx([unit], abs=0.02)


def test_bars_have_the_bytes_of_their_layers(drawn):
    held = [float(r["height"]) for r in drawn.rects("Memory over layers", "s0")]
    plain = [float(r["height"]) for r in drawn.rects("Memory over layers", "without")]
    assert held[0] / held[1] == pytest.approx(2, abs=0.02)
    assert [p / held[1] for p in plain] == pytest.approx([10 / 3, 2], abs=0.04)


def test_the_chosen_point_lies_on_the_frontier(drawn):
    diamond = next(g["d"] for s, t, g in drawn.shapes if s == "Frontier" and "s1" in g.get("class", ""))
    line = next(g["d"] for s, t, g in drawn.shapes if s == "Frontier" and "line" in g.get("class", ""))
    x, top = map(float, re.match(r"M([\d.]+) ([\d.]+)l", diamond).groups())
    corners = [tuple(map(float, pair)) for pair in re.findall(r"[ML]([\d.]+) ([\d.]+)", line)]
    assert corners[1] == pytest.approx((x, top + 10), abs=0.11)
    assert corners[0][1] < corners[1][1] < corners[2][1]  # less memory, more time: upwards is a smaller y


def test_what_is_said(drawn):
    text = " ".join(drawn.text)
    for words in ("cpu <x86_64>", "9.0 MiB", "12.0 ms", "a <reason>", "5.0 -> 6.0 ms", "m<1>", "logarithmic"):
        assert words in text


def test_a_missing_loss_is_a_gap(drawn):
    loss = next(g["d"] for s, t, g in drawn.shapes if s == "Loss" and "line" in g.get("class", ""))
    assert (loss.count("M"), loss.count("L")) == (2, 37)


def test_a_run_without_a_plan_says_so():
    keys = ("plan", "gradient_errors", "frontiers", "decisions")
    text = " ".join(Page(page({k: v for k, v in REPORT.items() if k not in keys})).text)
    for words in (
        "has no plan for single tensors",
        "None were measured",
        "only --adacc-plan auto",
        "the same to the end",
    ):
        assert words in text


def test_long_runs_are_thinned():
    points, group = thinned([(i, float(i)) for i in range(1, 100_001)], max)
    assert (len(points), group, points[-1]) == (599, 167, (100_000, 100_000.0))
    assert thinned([(1, 1.0), (2, None)], max) == ([(1, 1.0), (2, None)], 1)


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 1, 0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Scale(0.02, 3, 0, 1, True), [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]),
    ],
)
def test_ticks_are_round(scale, ticks):
    assert scale.ticks == pytest.approx(ticks)
    assert (scale(scale.low), scale(scale.high)) == (0, 1)


def test_values_that_a_logarithm_has_not_are_gaps():
    drawn = Chart("t", "x", "y", [Line("l", "s0", [(1, 0.1), (2, 0.0), (3, 1.0)])], logarithmic=True).svg()
    assert drawn.count("L") == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "no report"), ('{"iterations": [], "summary": {}}', "missing or of another kind"), (None, "no report")],
)
def test_what_is_no_report(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "r.json").write_text(text)
    assert main(["report", str(tmp_path / "r.json")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_run_of_megatron_is_reported(trained, tmp_path):
    run = trained(plan="auto", adacc_limit="40%", iterations=5)
    report = run.report
    layers = {f"layer.{one['layer']}": sum(t["held_bytes"] for t in one["tensors"]) for one in report["plan"]}
    assert layers.keys() == report["layer_held_bytes"].keys()
    for name, size in layers.items():  # what two layers hold is measured for the first alone
        assert 0 <= size - report["layer_held_bytes"][name] <= 1024
    (frontier,) = report["frontiers"]
    held = [one["held_bytes"] for one in frontier["points"]]
    times = [one["step_us"] for one in frontier["points"]]
    assert len(held) > 2
    assert held == sorted(held, reverse=True)
    assert times == sorted(times)
    assert frontier["chosen"]["held_bytes"] == report["predicted"][0]["held_bytes"] <= frontier["limit_bytes"]
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert main(["report", str(tmp_path / "r.json")]) == 0
    assert len(Page((tmp_path / "r.html").read_text()).rects("The plan", "keep")) > 2


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: what a browser draws is not looked at")
@pytest.mark.parametrize("ground", ["light", "dark"])
def test_a_browser_draws_it(tmp_path, drawn, ground):
    """The pixels of each action's colour are those of its blocks, and of the legends and bars beside them."""
    from matplotlib.image import imread

    (tmp_path / "r.html").write_text(page(REPORT))
    assert CHROMIUM is not None
    subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,2600"),
            f"--blink-settings=preferredColorScheme={int(ground == 'light')}",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--screenshot={tmp_path / 'r.png'}",
            f"file://{tmp_path}/r.html",
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    pixels = (imread(tmp_path / "r.png")[:, :, :3] * 255).round().astype(int)

    def count(name):
        colour = COLOURS[name][ground == "dark"]
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return int((abs(pixels - [red, green, blue]).max(axis=2) <= 2).sum())

    def area(name, *classes):
        return sum(
            float(r["width"]) * float(r["height"])
            for section in ("The plan", "Plan changes")
            for r in drawn.rects(section, name, *classes)
        )

    # Lines between the blocks are in the colour of the ground.
    assert count("keep") == pytest.approx(area("keep", "whole"), rel=0.12)
    assert count("bitmask") == pytest.approx(area("bitmask", "held"), rel=0.25)
    assert count("codec0") == pytest.approx(area("codec0", "held"), rel=0.15)
    hatched = count("recompute") / area("recompute", "whole")
    assert 0.2 < hatched < 0.8  # a third is covered, and edges are mixed colours
    bars = sum(float(r["width"]) * float(r["height"]) for r in drawn.rects("Memory over layers", "s0"))
    assert count("s0") > 0.97 * bars
    assert count("s1") > 500  # the line of the peak, the diamond
    assert count("ground") > pixels.shape[0] * pixels.shape[1] / 2
