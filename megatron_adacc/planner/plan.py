"""Plans: for each saved buffer of each layer, what becomes of it. Pure data, JSON, no torch.

A plan names buffers by site, so that it holds for every layer of a class, on every rank, in every process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_adacc.atomic import write_text
from megatron_adacc.errors import UserError
from megatron_adacc.planner.reason import Reason

FORMAT = 1
LOSSLESS_CODECS = frozenset({"bitmask"})


@dataclass(frozen=True)
class Keep:
    """Hold the tensor as autograd would."""

    lossless = True

    def __str__(self) -> str:
        return "keep"

    def to_data(self) -> dict[str, Any]:
        return {"action": "keep"}


@dataclass(frozen=True)
class Recompute:
    """Drop the tensor and rebuild it in backward by its recipe."""

    lossless = True

    def __str__(self) -> str:
        return "recompute"

    def to_data(self) -> dict[str, Any]:
        return {"action": "recompute"}


@dataclass(frozen=True)
class Compress:
    """Hold the tensor as ``codec`` packs it, made with ``options`` (name, value)."""

    codec: str
    options: tuple[tuple[str, bool | int | float | str], ...] = ()

    @property
    def lossless(self) -> bool:
        return self.codec in LOSSLESS_CODECS

    def __str__(self) -> str:
        return f"compress({self.codec})"

    def to_data(self) -> dict[str, Any]:
        return {"action": "compress", "codec": self.codec, "options": dict(self.options)}


Action = Keep | Recompute | Compress


def action_from_data(data: Mapping[str, Any]) -> Action:
    """The action of one entry of a plan file. Raises UserError for an unknown one."""
    match data:
        case {"action": "keep"}:
            return Keep()
        case {"action": "recompute"}:
            return Recompute()
        case {"action": "compress", "codec": str(codec)}:
            return Compress(codec, tuple(sorted(data.get("options", {}).items())))
    raise UserError(f"A plan's action must be keep, recompute or compress with a codec, not {dict(data)!r}.")


@dataclass(frozen=True)
class LayerPlan:
    """Actions for one layer class, or for one layer of it.

    ``fingerprint`` is the graph's; ``layer`` the layer's place among those attached, None for all of the
    class; ``actions`` give (site, action), a site not named is kept; ``stage`` the pipeline stage whose layers
    these are, None where the plan is for one stage only."""

    fingerprint: str
    actions: tuple[tuple[str, Action], ...]
    layer: int | None = None
    stage: int | None = None

    def action(self, site: str) -> Action:
        return dict(self.actions).get(site, Keep())

    @property
    def lossless(self) -> bool:
        return all(action.lossless for _, action in self.actions)


@dataclass(frozen=True)
class Plan:
    """What becomes of the activations of a model's layers, on one pipeline stage or on each.

    ``notes``: what it was made for, by name; ``reasons``: why, as far as that was asked."""

    layers: tuple[LayerPlan, ...]
    name: str = "plan"
    notes: tuple[tuple[str, str], ...] = field(default=())
    reasons: tuple[Reason, ...] = field(default=())

    @property
    def lossless(self) -> bool:
        return all(layer.lossless for layer in self.layers)

    def of_stage(self, stage: int) -> Plan:
        """The part for one pipeline stage."""
        own = tuple(layer for layer in self.layers if layer.stage in (None, stage))
        return replace(self, layers=own, reasons=tuple(r for r in self.reasons if r.stage in (None, stage)))

    def find(self, fingerprint: str, sites: Iterable[str], layer: int) -> LayerPlan | None:
        """The plan for the layer at place ``layer`` whose graph has this fingerprint.

        A plan for that very layer comes before one for its class. For a graph of another shape (the last,
        smaller batch) the plan of a class with the same sites serves. None when nothing fits."""
        known = set(sites)
        for exact in (True, False):
            for place in (layer, None):
                for candidate in self.layers:
                    fits = (
                        candidate.fingerprint == fingerprint
                        if exact
                        else {site for site, _ in candidate.actions} <= known
                    )
                    if fits and candidate.layer == place:
                        return candidate
        return None

    def to_json(self) -> str:
        layers = [
            {
                "fingerprint": layer.fingerprint,
                "layer": layer.layer,
                **({} if layer.stage is None else {"stage": layer.stage}),
                "actions": {site: action.to_data() for site, action in layer.actions},
            }
            for layer in self.layers
        ]
        content = {"format": FORMAT, "name": self.name, "notes": dict(self.notes), "layers": layers}
        if self.reasons:
            content["reasons"] = [reason.to_data() for reason in self.reasons]
        return json.dumps(content, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan of :meth:`to_json`. Raises UserError when the text is none."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"A plan file must hold JSON; this one does not: {error}.") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UserError(f"A plan file must say format {FORMAT}; make the plan again with this version.")
        try:
            layers = tuple(
                LayerPlan(
                    layer["fingerprint"],
                    tuple((site, action_from_data(data)) for site, data in layer["actions"].items()),
                    layer["layer"],
                    layer.get("stage"),
                )
                for layer in content["layers"]
            )
            reasons = tuple(Reason.from_data(reason) for reason in content.get("reasons", []))
            return Plan(layers, content["name"], tuple(content["notes"].items()), reasons)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(
                f"A plan file of format {FORMAT} has layers, each with fingerprint, layer and actions; in this one "
                f"something is missing or of another kind ({error})."
            ) from error

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, whole or not at all. Raises OSError where it cannot be written."""
        write_text(path, self.to_json() + "\n")

    @staticmethod
    def load(path: Path | str) -> Plan:
        """The plan in a file. Raises UserError when there is no such file or it holds no plan."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise UserError(f"The plan file {path} cannot be read: {error.strerror}.") from error
        try:
            return Plan.from_json(text)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    def __str__(self) -> str:
        lines = [f"plan {self.name}: {len(self.layers)} layer plans, {'lossless' if self.lossless else 'lossy'}"]
        for layer in self.layers:
            where = "all layers" if layer.layer is None else f"layer {layer.layer}"
            where += "" if layer.stage is None else f" of stage {layer.stage}"
            lines.append(f"  {layer.fingerprint} ({where})")
            lines += [f"    {site}: {action}" for site, action in layer.actions]
        return "\n".join(lines)
