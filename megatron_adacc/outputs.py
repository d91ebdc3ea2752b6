"""Files that a command writes: refused before anything is computed, or in a sentence."""

import os

from megatron_adacc.atomic import write_text
from megatron_adacc.errors import UserError


def check_folders(*files: str | None, or_printed: str | None = None) -> None:
    """Raises UserError for a file whose folder does not exist, or that is a folder, and for - among files; None is no
    file. ``or_printed``: one that may be - for standard output."""
    if "-" in files:
        raise UserError("- stands for standard output, which takes JSON alone: name a file.")
    for path in (*files, None if or_printed == "-" else or_printed):
        if path is None:
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
