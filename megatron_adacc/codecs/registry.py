"""The codecs by name."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_adacc.codecs.affine import Affine
from megatron_adacc.codecs.base import Codec
from megatron_adacc.codecs.bitmask import Bitmask
from megatron_adacc.codecs.channel import Channel
from megatron_adacc.codecs.group import Group
from megatron_adacc.codecs.options import Implementation, Rounding, Scale, choice
from megatron_adacc.codecs.outlier import Outlier
from megatron_adacc.errors import UserError

CODECS: Mapping[str, tuple[type[Codec], Mapping[str, Any]]] = MappingProxyType(
    {
        "bitmask": (Bitmask, {}),
        "outlier_int4": (Outlier, {"bits": 4}),
        "outlier_int8": (Outlier, {"bits": 8}),
        "outlier_int2": (Outlier, {"bits": 2}),
        "channel_int4": (Channel, {"bits": 4}),
        "affine_int4": (Affine, {"bits": 4}),
        "group_int4": (Group, {"bits": 4}),
        "group_int8": (Group, {"bits": 8}),
        "group_int2": (Group, {"bits": 2}),
    }
)


_CHOICES: Mapping[str, type[enum.Enum]] = MappingProxyType(
    {"implementation": Implementation, "rounding": Rounding, "scale": Scale}
)


def names() -> tuple[str, ...]:
    """All codec names."""
    return tuple(CODECS)


def get(name: str, **options: Any) -> Codec:
    """The codec of this name.

    Raises:
        UserError: an unknown name, option or value.
    """
    if name not in CODECS:
        raise UserError(f"There is no codec '{name}'; there are {', '.join(CODECS)}.")
    kind, fixed = CODECS[name]
    known = [field for field in kind.__dataclass_fields__ if field not in ("name", *fixed)]
    for option in options:
        if option not in known:
            raise UserError(f"Codec '{name}' has no option '{option}'; it has {', '.join(known)}.")
    for option, enumeration in _CHOICES.items():
        if option in options:
            options[option] = choice(enumeration, options[option], option)
    return kind(name=name, **fixed, **options)
