"""Errors of the stash that are not a user's mistake in a flag."""


class TraceMismatchError(RuntimeError):
    """A layer saved something else than its trace says; nothing is guessed, training stops here."""


class ModifiedTensorError(RuntimeError):
    """A tensor that backward needs was written in place after the forward saved it."""


def modified(site: str, version: int, expected: int) -> ModifiedTensorError:
    """The error in autograd's own words, with the site."""
    return ModifiedTensorError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{site} is at version {version}; expected version {expected} instead."
    )
