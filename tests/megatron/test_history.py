"""adacc explain of a run's report: how its plan changed."""

import json
from html.parser import HTMLParser

import pytest

from megatron_adacc.cli import main
from megatron_adacc.megatron.history_page import history_page, history_text

REPORT = {
    "summary": {"strategy": "auto", "iterations": 40},
    "device": "cpu (x86_64)",
    "world_size": 2,
    "iterations": [],
    "decisions": [
        {
            "stage": 0, "tensor_rank": 1, "step": 7, "why": ["memory <was> above"], "changed": ["a: keep -> recompute"],
            "effect": "5.0 -> 6.0 ms", "plan": {"keep": 300, "recompute": 100, "outlier_int4": 600},
        },
        {"stage": 1, "tensor_rank": 0, "step": 9, "why": ["x", "y"], "changed": ["z"], "effect": "", "plan": {}},
    ],
}  # fmt: skip


class Page(HTMLParser):
    """Widths of the bars' parts by row, and that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[float]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag in ("meta", "br"):
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "i" and "tr" in self.open:
            style = dict(attributes)["style"]
            self.rows[-1].append(float(style.split("width: ")[1].rstrip("%")))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_table_has_a_row_for_each_decision():
    text = history_text(REPORT)
    assert text.startswith("Plan auto in 40 iterations on cpu (x86_64), 2 ranks: 2 decisions.\n\n")
    assert "7     stage 0, tensor rank 1  memory <was> above  a: keep -> recompute  5.0 -> 6.0 ms" in text
    assert "x; y" in text


def test_the_page_draws_the_bytes_of_each_decision():
    page = Page(history_page(REPORT))
    assert page.rows == [[], [30.0, 10.0, 60.0], []]
    assert "memory <was> above" in page.text
    assert "the layers are traced again" in page.text
    assert any("2 decisions" in part for part in page.text)


def test_explain_takes_a_report(tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps(REPORT))
    assert main(["explain", str(tmp_path / "r.json"), "--html", str(tmp_path / "h.html")]) == 0
    assert "2 decisions" in capsys.readouterr().out
    assert "<h1>History of the plan</h1>" in (tmp_path / "h.html").read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2}'])
def test_what_is_neither(tmp_path, capsys, text):
    (tmp_path / "r.json").write_text(text)
    assert main(["explain", str(tmp_path / "r.json")]) == 2
    assert "plan file" in capsys.readouterr().err
