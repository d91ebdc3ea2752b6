"""The codecs by name."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_adacc.codecs.base import Codec
from megatron_adacc.codecs.bitmask import Bitmask
from megatron_adacc.codecs.options import Implementation, choice
from megatron_adacc.errors import UserError

CODECS: Mapping[str, tuple[type[Codec], Mapping[str, Any]]] = MappingProxyType(
    {
        "bitmask": (Bitmask, {}),
    }
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
    options["implementation"] = choice(
        Implementation, options.get("implementation", Implementation.AUTO), "implementation"
    )
    known = [field for field in kind.__dataclass_fields__ if field not in ("name", *fixed)]
    for option in options:
        if option not in known:
            raise UserError(f"Codec '{name}' has no option '{option}'; it has {', '.join(known)}.")
    return kind(name=name, **fixed, **options)
