"""precision_policy: which parameters may have how few bits.

    PrecisionPolicy({"*norm*": 32, "*.mlp.*": [16, 8, 8, 4], "*": 4})

Patterns are shell patterns on parameter names (fnmatch); the first that matches decides. A list has one entry for
each depth: the depth is the first whole number in the name, 2 in "decoder.layers.2.mlp.weight". What matches
nothing may have 4 bits.
"""

import fnmatch
from collections.abc import Iterable, Mapping

from megatron_adacc.errors import UserError
from megatron_adacc.optim.formats import STATE_BITS

LEAST_BITS = STATE_BITS[-1]


def depth_of(name: str) -> int | None:
    """The first whole number among the dotted parts of a parameter's name; None if there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


class PrecisionPolicy:
    """The lowest allowed bits by parameter name.

    Args:
        rules: pattern -> bits, or a list of bits by depth; in order.

    Raises:
        UserError: bits other than 32, 16, 8, 4, or an empty list.
    """

    def __init__(self, rules: Mapping[str, int | list[int]]) -> None:
        for pattern, bits in rules.items():
            listed = bits if isinstance(bits, list) else [bits]
            if not listed or any(value not in STATE_BITS for value in listed):
                raise UserError(
                    f"precision_policy gives '{pattern}' the value {bits!r}; it is 32, 16, 8 or 4, or a list of these "
                    "with one entry for each layer."
                )
        self._rules = dict(rules)

    def lowest_bits(self, name: str) -> int:
        """The fewest bits a block of this parameter may have.

        Raises:
            UserError: its rule is a list, and the name has no depth or one beyond the list.
        """
        for pattern, bits in self._rules.items():
            if not fnmatch.fnmatchcase(name, pattern):
                continue
            if not isinstance(bits, list):
                return bits
            depth = depth_of(name)
            if depth is None or depth >= len(bits):
                place = "has no layer number in its name" if depth is None else f"is in layer {depth}"
                raise UserError(
                    f"precision_policy has a list of {len(bits)} layers for '{pattern}', but '{name}' {place}; give "
                    "one entry for each layer, or one number for all."
                )
            return bits[depth]
        return LEAST_BITS

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse patterns that no parameter has: they are mistyped more often than meant.

        Raises:
            UserError: names the first such pattern.
        """
        known = list(names)
        for pattern in self._rules:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                raise UserError(f"precision_policy has a rule for '{pattern}', but no parameter's name matches it.")
