"""benchmarks/peers.py runs, at a tiny size, and its figures are those of what it names."""

import contextlib
import copy
import importlib
import io
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron_adacc import attach
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import Room, plan_stage

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SIZES = {"--hidden": 32, "--heads": 2, "--sequence": 32, "--batch": 2, "--rounds": 1}
TINY = [
    *(word for name, value in SIZES.items() for word in (name, str(value))),
    *("--part", "eager", "--percents", "25", "50"),
]


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    """The script as a module, with its settings undone afterwards."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("ADACC_CACHE_DIR", "off")
        yield importlib.import_module("peers")
    for name in ("peers", "peers_report", "engine"):
        sys.modules.pop(name, None)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def report(peers: ModuleType) -> str:
    """What the script writes for a tiny stack."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        peers.main(TINY)
    return out.getvalue()


def rows(report: str, header: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this header, by each of their names."""
    lines = report[report.index(f"| {header} |") :].splitlines()[2:]
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found |= dict.fromkeys(names.split(", "), cells)
    return found


def test_every_lossless_variant_has_the_gradients_of_the_plain_run(report: str) -> None:
    table = rows(report, "variant")
    assert {"plain", "checkpoint", "matmuls", "linears", "core", "auto 25%", "paper 50%"} <= set(table)
    assert {name: cells[-1] for name, cells in table.items()} == dict.fromkeys(table, "0")


def test_held_bytes_are_ordered_and_as_predicted(report: str) -> None:
    share = {name: float(cells[5]) for name, cells in rows(report, "variant").items()}
    assert share["plain"] == 100
    assert share["checkpoint"] < share["linears"] < share["matmuls"] < 100
    assert share["auto 25%"] <= 25 < share["auto 50%"] <= 50
    assert share["auto = matmuls held"] <= share["matmuls"]
    predicted = rows(report, "plan")
    assert len(predicted) >= 4
    for name, cells in predicted.items():
        assert cells[0] == cells[1], name


def test_each_peer_gets_a_verdict(report: str) -> None:
    for name in ("matmuls", "linears", "core"):
        assert re.search(rf"^- {name}: auto at its held bytes takes \d\.\d+ \(", report, re.MULTILINE)
    assert "- At 25 %: auto takes" in report


def test_predicted_peak_is_an_upper_bound_within_3_percent_where_the_forward_needs_most(peers: ModuleType) -> None:
    """Without dropout the forward's peak is above the backward's: what was saved a moment ago counts once, and what
    was freed since the last op does not count."""
    torch.manual_seed(1)
    stack = nn.ModuleList(peers.GptLayer(64, 4, 128, 0.0) for _ in range(2))
    x = torch.randn(4, 128, 64, requires_grad=True)
    stage = peers.learned(stack, x)
    for percent in (25, 42, 75, 100):
        answer = plan_stage(stage.facts, Limit(share=Fraction(percent, 100)), Room())
        layers = copy.deepcopy(stack)
        with attach(layers, answer.plan):
            variant = peers.Variant("auto", layers, peers.plain)
            variant.step(x)
            _, measured = peers.memory(variant, x)
        assert measured <= answer.predicted.peak_bytes <= 1.03 * measured, percent
