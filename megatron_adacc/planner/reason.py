"""Why a buffer got its action: pure data, as it is stored in plan files and printed. See planner/explain.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Reason:
    """``layers``: places of the group in the stage, from 0. ``second``: what the buffer gets when ``action`` is
    forbidden, None where there is no other plan; ``more_us`` and ``more_bytes`` what all layers of the group then cost
    and hold more (bytes of (4), so all micro-batches in flight). ``proven``: the solver had the time to be sure.
    ``stage``: the pipeline stage, None where there is one only."""

    layers: tuple[int, ...]
    site: str
    action: str
    second: str | None
    more_us: float
    more_bytes: int
    proven: bool = True
    stage: int | None = None

    @property
    def sentence(self) -> str:
        if self.second is None:
            nothing = "nothing else is possible within the limit"
            return f"{self.action}: {nothing if self.proven else 'the time was over before the answer'}"
        held = "as many bytes"
        if self.more_bytes:
            held = f"{abs(self.more_bytes):,} bytes {'more' if self.more_bytes > 0 else 'less'}"
        cost = f"{'' if self.proven else 'at most '}{self.more_us:,.1f} us more"
        return f"{self.action}: {self.second} instead would cost {cost} and hold {held}"

    def to_data(self) -> dict[str, Any]:
        """As JSON's types, places as runs [first, last]."""
        data = {**asdict(self), "layers": [list(run) for run in runs(self.layers)]}
        return {name: value for name, value in data.items() if name != "stage" or value is not None}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Reason:
        """The reason of :meth:`to_data`. Raises KeyError, TypeError or ValueError where it is none."""
        kinds = {"site": str, "action": str, "second": (str, type(None)), "more_us": (int, float), "more_bytes": int}
        for name, kind in kinds.items():
            if not isinstance(data[name], kind):  # type: ignore[arg-type]
                raise TypeError(f"{name} is {data[name]!r}")
        places = tuple(place for first, last in data["layers"] for place in range(first, last + 1))
        return Reason(
            places, data["site"], data["action"], data["second"], float(data["more_us"]), data["more_bytes"],
            bool(data["proven"]), data.get("stage"),
        )  # fmt: skip


def table(reasons: tuple[Reason, ...]) -> str:
    """The reasons as text, one line a buffer, the dearest to change first within a group."""
    lines: list[str] = []
    for stage, places in dict.fromkeys((reason.stage, reason.layers) for reason in reasons):
        lines.append(("" if stage is None else f"stage {stage}, ") + written_places(places))
        group = [reason for reason in reasons if (reason.stage, reason.layers) == (stage, places)]
        width = max(len(reason.site) for reason in group)
        ordered = sorted(group, key=lambda r: (r.second is not None, -r.more_us, r.site))
        lines += [f"  {reason.site:<{width}}  {reason.sentence}" for reason in ordered]
    return "\n".join(lines)


def runs(places: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ascending places as stretches (first, last)."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and place == found[-1][1] + 1:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found


def written_places(places: tuple[int, ...]) -> str:
    """For people: layers 0-3, 7."""
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs(places)]
    return ("layer " if len(places) == 1 else "layers ") + ", ".join(words)
