"""The picture of a layer graph: one box for each op and buffer, coloured and sized by the graph and the plan."""

import itertools
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from megatron_adacc.graph import LayerGraph, trace
from megatron_adacc.graph.picture import Fate, page


class Layer(nn.Module):
    """Two linears with a nonlinearity, a residual and a <b>name</b> to be escaped in the title."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.fixture(scope="module")
def graph() -> LayerGraph:
    return trace(Layer(), torch.randn(8, 64, requires_grad=True))


def boxes(text: str, kind: str) -> list[ElementTree.Element]:
    """The groups of the drawing whose class begins with `kind`."""
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    return [group for group in root.iter("g") if group.get("class", "").split()[0] == kind]


def bar(group: ElementTree.Element) -> ElementTree.Element:
    return next(rect for rect in group.iter("rect") if rect.get("class") == "bar")


def titles(groups: list[ElementTree.Element]) -> dict[str, ElementTree.Element]:
    return {(group.findtext("title") or "").splitlines()[0]: group for group in groups}


def test_one_box_for_each_op_and_buffer(graph: LayerGraph) -> None:
    text = page(graph, {}, "t", "s")
    assert len(graph.ops) == 4
    assert len(boxes(text, "op")) == 4
    ops = [(group.findtext("title") or "").splitlines()[0] for group in boxes(text, "op")]
    assert ops == [f"{op.index}: {op.target}" for op in graph.ops]
    assert set(titles(boxes(text, "buffer"))) == {b.site for b in graph.buffers}
    assert len(boxes(text, "buffer")) == len(graph.buffers)


def test_colours_are_the_actions(graph: LayerGraph) -> None:
    kinds = ("keep", "compress")
    assert len(graph.saved) == 2  # the input, and what relu gives
    fates = {b: Fate(kind, kind, 100) for b, kind in zip(graph.saved, kinds, strict=True)}
    found = titles(boxes(page(graph, fates, "t", "s"), "buffer"))
    for buffer in graph.buffers:
        expected = "unsaved" if buffer.writer is not None else "outside"
        if buffer.index in fates:
            expected = fates[buffer.index].kind
        assert found[buffer.site].get("class") == f"buffer {expected}"
    colours = re.findall(r"\.buffer\.(\w+) rect\.bar \{ fill: (#\w+) \}", page(graph, fates, "t", "s"))
    assert {name for name, _ in colours} == {"keep", "compress", "recompute", "unsaved", "outside"}
    assert len({colour for _, colour in colours}) == 5


def test_widths_are_bytes(graph: LayerGraph) -> None:
    largest = max(graph.buffers, key=lambda b: b.nbytes)
    assert largest.nbytes == 256 * 64 * 4  # a weight
    found = titles(boxes(page(graph, {}, "t", "s"), "buffer"))
    for buffer in graph.buffers:
        expected = max(2.0, 240 * buffer.nbytes / largest.nbytes)
        assert float(bar(found[buffer.site]).get("width", "0")) == pytest.approx(expected, rel=1e-4)
    assert "100 px are 26.7 KiB" in page(graph, {}, "t", "s")  # 65,536 bytes are 240 px


def test_the_held_part_of_a_compressed_buffer(graph: LayerGraph) -> None:
    index = graph.saved[1]
    quarter = graph.buffers[index].nbytes // 4
    group = titles(boxes(page(graph, {index: Fate("compress", "c", quarter)}, "t", "s"), "buffer"))
    rects = {rect.get("class"): float(rect.get("width", "0")) for rect in group[graph.buffers[index].site].iter("rect")}
    assert rects["held"] == pytest.approx(rects["bar"] / 4, rel=1e-4)


def test_a_line_for_each_read_and_write(graph: LayerGraph) -> None:
    root = ElementTree.fromstring(page(graph, {}, "t", "s").removeprefix("<!DOCTYPE html>"))
    edges = [path for path in root.iter("path") if path.get("class", "").startswith("edge")]
    assert len(edges) == sum(len(op.reads) + len(op.writes) for op in graph.ops)


def test_boxes_do_not_overlap(graph: LayerGraph) -> None:
    text = page(graph, {}, "t", "s")
    for kind in ("op", "buffer"):
        columns: dict[bool, list[tuple[float, float]]] = {}
        for group in boxes(text, kind):
            rect = next(group.iter("rect"))
            top, height = float(rect.get("y", "0")), float(rect.get("height", "0"))
            written = kind == "op" or group.get("class") == "buffer unsaved"
            columns.setdefault(written, []).append((top, top + height))
        for spans in columns.values():
            spans.sort()
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_nothing_to_load_and_all_escaped(graph: LayerGraph) -> None:
    text = page(graph, {graph.saved[0]: Fate("keep", "keep", 5, 0, "a < b & c")}, "<b>title</b>", "1 & 2")
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert root.findtext("body/h1") == "<b>title</b>"
    assert root.findtext("body/p") == "1 & 2"
    assert "http" not in text
    assert not {"script", "link", "img", "iframe", "image", "use"} & {element.tag for element in root.iter()}
    assert "url(" not in text.replace("url(#arrow)", "")
