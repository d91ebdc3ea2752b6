"""megatron/training/argument_utils.py and arguments.py: a user's mistake is told as a sentence.

Megatron checks its arguments with `assert` and ValueError while it parses them and while it makes the
model's configuration of them. What these checks say is kept; the traceback around it is not.
"""

import functools
import traceback
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_adacc.errors import UserError
from megatron_adacc.patches.patching import Patch


def _sentence(error: Exception) -> str:
    """The check's own words, or the check itself where it has none, and where it stands."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(frame.filename.split("/")[-3:])
    words = str(error).strip() or f"this does not hold: {(frame.line or '').removeprefix('assert ')}"
    return f"Megatron refuses these arguments: {words} ({place}, line {frame.lineno})"


def with_sentences(original: Callable) -> Callable:
    """`original`, whose refusals are UserErrors."""

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except UserError:
            raise
        except (AssertionError, ValueError, ZeroDivisionError, NotImplementedError, OSError) as error:
            raise UserError(_sentence(error)) from error

    return checked


def _make_validated(check: Callable[[Namespace], None]) -> Callable[[Callable], Callable]:
    def make(original: Callable) -> Callable:
        checked = with_sentences(original)

        @functools.wraps(original)
        def parse_and_validate_args(*args: Any, **kwargs: Any) -> Namespace:
            namespace = checked(*args, **kwargs)
            check(namespace)
            return namespace

        return parse_and_validate_args

    return make


def patches(check: Callable[[Namespace], None]) -> list[Patch]:
    """`check(args)` sees the validated namespace and raises UserError for what Megatron does not look at."""
    return [
        Patch(
            module="megatron.training.arguments",
            symbol="parse_and_validate_args",
            parameters=("extra_args_provider", "ignore_unknown_args", "args_defaults"),
            checked_with=("0.19.2",),
            make=_make_validated(check),
            why="argument errors are sentences",
        ),
        Patch(
            module="megatron.training.argument_utils",
            symbol="gpt_config_from_args",
            parameters=("args", "config", "model_config_cls"),
            checked_with=("0.19.2",),
            make=with_sentences,
            why="argument errors are sentences",
        ),
    ]
