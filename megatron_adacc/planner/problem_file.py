"""A problem as JSON: one layer class, the same for all layers.

    {"limit_bytes": 25, "error_budget": null, "layers": 1, "in_flight": 1, "transient_bytes": 0,
     "buffers": [{"site": "a", "bytes": 10, "saved": true,
                  "codecs": {"int4": {"bytes": 4, "us": 2, "error": 0}}}],
     "ops": [{"name": "make_a", "us": 9, "reads": [], "writes": ["a"], "replayable": true}]}

limit_bytes, buffers and ops are needed; of a buffer site, bytes and saved; of a codec bytes and us; of an op name,
us, reads and writes. The rest has the values of this example (error 0) when it is left out, and a buffer may also say
must_hold (false) and storable (true), a codec again_us (0), the problem fixed_bytes (0). An op may read a name that is
no buffer: a parameter or a constant, which is always there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from megatron_adacc.errors import UserError
from megatron_adacc.planner.problem import BufferItem, CodecChoice, LayerClass, OpItem, Problem
from megatron_adacc.planner.validate import validate

Value = TypeVar("Value")

_REQUIRED: Any = object()
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def read_problem(path: Path | str) -> Problem:
    """The problem in a file. Raises UserError when it cannot be read or is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The problem file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"The problem file {path} must be text in UTF-8; byte {error.start} is not.") from error
    try:
        return problem_from_json(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def problem_from_json(text: str) -> Problem:
    """The problem that the text holds. Raises UserError, naming the place, for anything that is not as above."""
    try:
        content = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UserError(f"A problem must be JSON; this is not: {error}.") from error
    except RecursionError as error:
        raise UserError("A problem must be JSON of a few levels; this one is nested too deeply.") from error
    fields = _Fields("The problem", content)
    error_budget = fields.take("error_budget", lambda v, where: None if v is None else _number(v, where), None)
    layer = LayerClass(
        "",
        tuple(_buffer(item, place) for place, item in fields.items("buffers")),
        tuple(_op(item, place) for place, item in fields.items("ops")),
        fields.take("layers", _count, 1),
        fields.take("in_flight", _count, 1),
    )
    problem = Problem(
        (layer,),
        fields.take("limit_bytes", _bytes),
        fields.take("fixed_bytes", _bytes, 0),
        error_budget,
        fields.take("transient_bytes", _bytes, 0),
    )
    fields.close()
    validate(problem)
    return problem


def _buffer(item: Any, place: str) -> BufferItem:
    fields = _Fields(place, item)
    site = fields.take("site", _name)
    fields.where = f"Buffer {site}"
    buffer = BufferItem(
        site,
        fields.take("bytes", _bytes),
        fields.take("saved", _flag),
        tuple(_codec(name, content, site) for name, content in fields.take("codecs", _mapping, _NOTHING).items()),
        fields.take("must_hold", _flag, False),
        fields.take("storable", _flag, True),
    )
    fields.close()
    return buffer


def _codec(name: str, content: Any, site: str) -> CodecChoice:
    fields = _Fields(f"Codec {name} of buffer {site}", content)
    codec = CodecChoice(
        _name(name, f"The name of a codec of buffer {site}"),
        fields.take("bytes", _bytes),
        fields.take("us", _number),
        fields.take("error", _number, 0.0),
        fields.take("again_us", _number, 0.0),
    )
    fields.close()
    return codec


def _op(item: Any, place: str) -> OpItem:
    fields = _Fields(place, item)
    name = fields.take("name", _name)
    fields.where = f"Op {name}"
    op = OpItem(
        name,
        fields.take("us", _number),
        fields.take("reads", _names),
        fields.take("writes", _names),
        fields.take("replayable", _flag, True),
    )
    fields.close()
    return op


class _Fields:
    """The fields of one JSON object, each to be taken once; ``where`` names it in sentences."""

    def __init__(self, where: str, content: Any) -> None:
        self.where = where
        self._left = dict(_mapping(content, where))
        self._known: list[str] = []

    def take(self, key: str, read: Callable[[Any, str], Value], default: Value = _REQUIRED) -> Value:
        self._known.append(key)
        if key in self._left:
            return read(self._left.pop(key), f"{self.where}: {key}")
        if default is _REQUIRED:
            raise UserError(f"{self.where} has no {key}, which it needs.")
        return default

    def items(self, key: str) -> list[tuple[str, Any]]:
        """The entries of a list, each with words for its place."""
        listed = self.take(key, _list)
        return [(f"Entry {number} of {key}", item) for number, item in enumerate(listed, start=1)]

    def close(self) -> None:
        if self._left:
            raise UserError(
                f"{self.where} has {', '.join(map(repr, self._left))}, which is not known; it may have "
                f"{', '.join(self._known)}."
            )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise UserError(f"In a problem each name must stand once in its object, but {key!r} comes twice.")
        found[key] = value
    return found


def _no_constant(word: str) -> None:
    raise UserError(f"A problem's numbers must be finite, but {word} is among them.")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where} must be a JSON object, not {_shown(value)}.")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{where} must be a list, not {_shown(value)}.")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} must be a name in quotes, not {_shown(value)}.")
    return value


def _names(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_name(item, f"{where}: an entry") for item in _list(value, where))


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{where} must be true or false, not {_shown(value)}.")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(f"{where} must be a number that is not negative, not {_shown(value)}.")
    try:
        return float(value)
    except OverflowError as error:
        raise UserError(f"{where} is too large for a number: {_shown(value)}.") from error


def _bytes(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{where} must be a whole number of bytes that is not negative, not {_shown(value)}.")
    return value


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{where} must be a whole number of at least 1, not {_shown(value)}.")
    return value
