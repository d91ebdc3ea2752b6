"""What a user may set of adaptation; the first five names are those of Adacc (arXiv 2508.00806).

warmup_steps: 100
min_interval: 1
max_interval: 64
outlier_threshold: 3.0
compression_levels:
  Linear: outlier_separated
  Attention: channel_wise
plan: compress
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megatron_adacc.errors import UserError

LEVELS = ("outlier_separated", "channel_wise", "direct", "none")
TARGETS = ("Linear", "Attention")
DEFAULT_LEVELS = MappingProxyType({"Linear": "outlier_separated", "Attention": "channel_wise"})


@dataclass(frozen=True)
class Config:
    """Frozen; :meth:`from_mapping`, :meth:`from_yaml` and :meth:`load` make one and refuse what is not right.

    Attributes:
        warmup_steps: steps with a lossless plan before a lossy one is used.
        min_interval, max_interval: steps between checks, least and most.
        outlier_threshold: z above which a channel is an outlier to the monitor.
        compression_levels: for the plan "compress", how the inputs of linear layers ("Linear": also norm outputs and
            the residual stream) and query, key and value ("Attention") are held: "outlier_separated", "channel_wise",
            "direct" (groups without either) or "none" (not compressed).
        plan: as for attach(): a name or the path of a plan file.
        limit, error_budget: for the plan "auto", as for attach().
        overlap: least share of the outliers' sum of |x| that has to lie in the outlier columns in use.
        error_band: an error estimate that has grown by more than this factor is a change.
        loss_jump: relative growth of the loss over its running mean that is a change.
        memory_share: share of a GPU's memory above which the peak is a change.
        check_gradients_every: steps between comparisons of each layer's gradients with exact ones; 0 for none.
        max_gradient_error: relative error found by such a comparison above which a layer's lossy actions end.
    """

    warmup_steps: int = 100
    min_interval: int = 1
    max_interval: int = 64
    outlier_threshold: float = 3.0
    compression_levels: Mapping[str, str] = field(default_factory=lambda: DEFAULT_LEVELS)
    plan: str = "compress"
    limit: str | None = None
    error_budget: float = 0.0
    overlap: float = 0.9
    error_band: float = 1.5
    loss_jump: float = 0.15
    memory_share: float = 0.9
    check_gradients_every: int = 0
    max_gradient_error: float = 0.3

    def __post_init__(self) -> None:
        for name, (kind, words, fits) in _RULES.items():
            value = getattr(self, name)
            right = isinstance(value, kind) and not isinstance(value, bool)
            if not right or not fits(value):
                raise UserError(f"{name} has to be {words}; it is {value!r}.")
        if self.min_interval > self.max_interval:
            raise UserError(
                f"min_interval has to be at most max_interval; they are {self.min_interval} and {self.max_interval}."
            )
        _check_levels(self.compression_levels)
        if self.plan != "compress" and dict(self.compression_levels) != dict(DEFAULT_LEVELS):
            raise UserError(
                f"compression_levels are for the plan 'compress'; the plan {self.plan!r} does not look at them: leave "
                "them out."
            )
        if self.plan != "auto":
            for name, given in (("limit", self.limit is not None), ("error_budget", self.error_budget > 0)):
                if given:
                    raise UserError(
                        f"{name} is for the plan 'auto'; the plan {self.plan!r} does not look at it: leave it out."
                    )

    @staticmethod
    def from_mapping(settings: Mapping[str, Any]) -> Config:
        """From a dict; what it does not name has its default.

        Raises UserError for an unknown name, a value of another kind, or one out of range."""
        if not isinstance(settings, Mapping):
            raise UserError(f"The settings of adaptation have to be names with values; they are {settings!r}.")
        known = [f.name for f in fields(Config)]
        for name in settings:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}."
                raise UserError(f"Adaptation has no setting {name!r}; {advice}")
        return Config(**settings)

    @staticmethod
    def from_yaml(text: str) -> Config:
        """From YAML text; empty text gives the defaults. Raises UserError as from_mapping does, and for no YAML."""
        return Config.from_mapping(_settings(text))

    @staticmethod
    def settings_in(path: Path | str, beside: Sequence[str] = ()) -> dict[str, Any]:
        """What a YAML file says, by name; ``beside``: names that are somebody else's, not checked here.

        Raises UserError, naming the file, where it cannot be read, or is not right."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise UserError(f"The file of settings {path} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"The file of settings {path} has to be text in UTF-8; it is not.") from error
        try:
            settings = _settings(text)
            own = settings
            if isinstance(settings, Mapping):
                own = {name: value for name, value in settings.items() if name not in beside}
            Config.from_mapping(own)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        return dict(settings)

    @staticmethod
    def load(path: Path | str) -> Config:
        """From a YAML file. Raises UserError, naming the file, where it cannot be read or is not right."""
        return Config.from_mapping(Config.settings_in(path))


def _settings(text: str) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"The settings of adaptation have to be YAML; these are not: {error}.") from error
    return {} if settings is None else settings


def _number(fits: Callable[[float], bool]) -> Callable[[float], bool]:
    return lambda value: math.isfinite(value) and fits(value)


_RULES: Mapping[str, tuple[type | tuple[type, ...], str, Callable[[Any], bool]]] = MappingProxyType({
    "warmup_steps": (int, "a whole number of steps, 0 or more", lambda v: v >= 0),
    "min_interval": (int, "a whole number of steps, 1 or more", lambda v: v >= 1),
    "max_interval": (int, "a whole number of steps, 1 or more", lambda v: v >= 1),
    "outlier_threshold": ((int, float), "a number above 0", _number(lambda v: v > 0)),
    "compression_levels": (Mapping, "a level for Linear, for Attention, or for both", lambda v: True),
    "plan": (str, "the name of a plan or the path of a plan file", lambda v: bool(v)),
    "limit": ((str, type(None)), "text such as '30GiB' or '25%'", lambda v: True),
    "error_budget": ((int, float), "a number, 0 or more", _number(lambda v: v >= 0)),
    "overlap": ((int, float), "a share from 0 to 1", _number(lambda v: 0 <= v <= 1)),
    "error_band": ((int, float), "a factor above 1", _number(lambda v: v > 1)),
    "loss_jump": ((int, float), "a number above 0", _number(lambda v: v > 0)),
    "memory_share": ((int, float), "a share above 0, at most 1", _number(lambda v: 0 < v <= 1)),
    "check_gradients_every": (int, "a whole number of steps, or 0 for never", lambda v: v >= 0),
    "max_gradient_error": ((int, float), "a number above 0", _number(lambda v: v > 0)),
})  # fmt: skip


def _check_levels(levels: Mapping[str, str]) -> None:
    for target, level in levels.items():
        if target not in TARGETS:
            raise UserError(f"compression_levels are for {' and '.join(TARGETS)}; there is no {target!r}.")
        if level not in LEVELS:
            raise UserError(f"The compression level of {target} has to be one of {', '.join(LEVELS)}; it is {level!r}.")
