"""Graphs as JSON, and their fingerprint: equal for layers of one class on all ranks and in all processes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

from megatron_adacc.graph.model import (
    Buffer,
    InputSpec,
    LayerGraph,
    Op,
    Origin,
    Pack,
    Role,
    Tagged,
    View,
)

FORMAT = 1
_CLASSES: dict[str, type] = {c.__name__: c for c in (Buffer, InputSpec, LayerGraph, Op, Pack, Tagged, View)}


def _plain(value: Any) -> Any:
    """Nested lists and dicts that JSON can hold; floats as hexadecimal so that every bit survives."""
    if isinstance(value, (Origin, Role)):
        return str(value)
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex() if math.isfinite(value) else repr(value)}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {"class": type(value).__name__} | fields


def _live(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_live(v) for v in value)
    if not isinstance(value, dict):
        return value
    if "float" in value:
        text = value["float"]
        return float(text) if text in ("inf", "-inf", "nan") else float.fromhex(text)
    fields = {k: _live(v) for k, v in value.items() if k != "class"}
    if value["class"] == "Buffer":
        fields["origin"] = Origin(fields["origin"])
    if value["class"] == "LayerGraph":
        fields["roles"] = tuple(Role(r) for r in fields["roles"])
    return _CLASSES[value["class"]](**fields)


def to_json(graph: LayerGraph) -> str:
    return json.dumps({"format": FORMAT, "graph": _plain(graph)}, separators=(",", ":"))


def from_json(text: str) -> LayerGraph:
    """The graph of :func:`to_json`. Raises ValueError for another format."""
    content = json.loads(text)
    if content.get("format") != FORMAT:
        raise ValueError(f"this is not a layer graph of format {FORMAT}")
    graph = _live(content["graph"])
    if not isinstance(graph, LayerGraph):
        raise ValueError("this file holds no layer graph")
    return graph


def fingerprint(graph: LayerGraph) -> str:
    """Sixteen hexadecimal digits that two graphs share exactly when they are equal."""
    return hashlib.sha256(to_json(graph).encode()).hexdigest()[:16]
