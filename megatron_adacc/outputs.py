"""Files that a command writes: refused before anything is computed, or in a sentence."""

import os

from megatron_adacc.atomic import write_text
from megatron_adacc.errors import UserError


def check_folders(*paths: str | None) -> None:
    """Raises UserError for a file whose folder does not exist, or that is a folder. None and - are no files."""
    for path in paths:
        if path is None or path == "-":
            continue
        if os.path.isdir(path):
            raise UserError(f"{path} cannot be written: it is a folder.")
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise UserError(f"{path} cannot be written: its folder does not exist.")


def write(path: str, text: str) -> None:
    """Write a file whole, or raise UserError."""
    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
