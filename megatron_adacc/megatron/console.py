"""What we say to the person who started the job: one line, on rank 0, beside Megatron's own."""

import os
import sys


def rank() -> int:
    """This process's rank as the launcher set it (0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


def say(message: str) -> None:
    """Print one line on rank 0."""
    if rank() == 0:
        sys.stdout.write(f"adacc: {message}\n")
        sys.stdout.flush()
