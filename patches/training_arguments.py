"""megatron/training/arguments.py: our flags join Megatron's own.

Upstream's scripts parse strictly and have no place for a plugin's flags, so `parse_args` is wrapped: the
flags are added to the parser, and what they mean is written into the namespace before it is validated.
"""

import functools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import NoReturn

from megatron_adacc.errors import UserError
from megatron_adacc.patches.patching import Patch


def patches(add_flags: Callable[[ArgumentParser], ArgumentParser], adjust: Callable[[Namespace], None]) -> list[Patch]:
    """`add_flags(parser)` adds arguments; `adjust(args)` may change the namespace before upstream validates it."""

    def make(original: Callable) -> Callable:
        def refuse(message: str) -> NoReturn:
            raise UserError(f"{message} (--help lists all flags).")

        @functools.wraps(original)
        def parse_args(
            extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
            ignore_unknown_args: bool = False,
        ) -> Namespace:
            def provider(parser: ArgumentParser) -> ArgumentParser:
                # argparse would print the usage of some 700 flags, on every rank, before it says what is wrong.
                parser.error = refuse  # type: ignore[method-assign]
                return add_flags(extra_args_provider(parser) if extra_args_provider is not None else parser)

            try:
                args = original(provider, ignore_unknown_args)
            except OSError as error:
                raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from error
            adjust(args)
            return args

        return parse_args

    return [
        Patch(
            module="megatron.training.arguments",
            symbol="parse_args",
            parameters=("extra_args_provider", "ignore_unknown_args"),
            checked_with=("0.19.2",),
            make=make,
            why="the --adacc-* flags are accepted by every script that uses Megatron's parser",
        )
    ]
