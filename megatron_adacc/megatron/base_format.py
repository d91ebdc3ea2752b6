"""--adacc-base in a Megatron job: what the flags mean, what is refused, and when the base gets fewer bits.

The base is loaded as it is and quantized then, on every start of the job anew: the same base, text and layout give the
same bits. A checkpoint of adapters says in its arguments which format its base had, and by which text.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.console import say

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "16bit"
FORMATS = (PLAIN, "nf4", "nf4-double", "int8", "gptq4")
CALIBRATED = ("int8", "gptq4")

# Sequences to calibrate with, as in GPTQ's paper; fewer where the text is shorter.
SEQUENCES = 128


def complete(args: Namespace) -> None:
    """Check --adacc-base and --adacc-base-text, and note the text's digest. Raises UserError for what cannot be
    meant."""
    args.adacc_base_digest = None
    if args.adacc_base not in FORMATS:
        raise UserError(f"--adacc-base is {args.adacc_base!r}, but it must be one of {', '.join(FORMATS)}.")
    if args.adacc_base != PLAIN and args.adacc_lora_rank is None:
        raise UserError(
            f"--adacc-base {args.adacc_base} needs --adacc-lora-rank: a base of fewer bits is not trained, and without "
            "adapters nothing is."
        )
    if args.adacc_base in CALIBRATED and args.adacc_base_text is None:
        raise UserError(
            f"--adacc-base {args.adacc_base} is calibrated on text such as the base will see: name a file of some with "
            "--adacc-base-text, or use --adacc-base nf4."
        )
    if args.adacc_base_text is None:
        return
    if args.adacc_base not in CALIBRATED:
        raise UserError(
            f"--adacc-base-text is for --adacc-base {' or '.join(CALIBRATED)}; {args.adacc_base} looks at no text: "
            "leave it out."
        )
    args.adacc_base_digest = _digest(args.adacc_base_text)


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"--adacc-base-text {path} cannot be read: {error.strerror}.") from None


def check(args: Namespace) -> None:
    """Look at validated arguments of a job with adapters. Raises UserError for what cannot go with --adacc-base."""
    if args.adacc_base == PLAIN:
        return
    for name, flag, reason in (
        ("qk_clip", "--qk-clip", "it changes weights of the base"),
        ("fp8", "--fp8-format", "it has a format of its own for weights"),
        ("fp4", "--fp4-format", "it has a format of its own for weights"),
    ):
        if getattr(args, name, None):
            raise UserError(f"{flag} cannot go with --adacc-base {args.adacc_base}: {reason}. Leave one of them out.")
    if args.adacc_base in CALIBRATED and args.context_parallel_size > 1:
        raise UserError(
            f"--adacc-base {args.adacc_base} cannot be calibrated with --context-parallel-size "
            f"{args.context_parallel_size}: use --adacc-base nf4."
        )


def refuse_other(load_dir: str, args: Namespace, trained: Namespace) -> None:
    """Raises UserError where adapters were trained beside a base of another format, or calibrated on another text."""
    was = getattr(trained, "adacc_base", PLAIN)
    if was != args.adacc_base:
        raise UserError(
            f"The adapters in {load_dir} were trained beside a base with --adacc-base {was}, not {args.adacc_base}: "
            "give it as it was."
        )
    if getattr(trained, "adacc_base_digest", None) != args.adacc_base_digest:
        raise UserError(
            f"The adapters in {load_dir} were trained beside a base that was calibrated on another text than "
            f"--adacc-base-text {args.adacc_base_text}, which was {trained.adacc_base_text} then: give that one, "
            "unchanged."
        )


class BaseFormat:
    """Gives the base of one job its format, once, when it was loaded or is known to be random."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._done = args.adacc_base == PLAIN

    def apply(self, model: list[Any]) -> None:
        """Quantize this rank's model chunks, wrapped or not; a second call does nothing. UserError as
        base_layers.quantize()."""
        if self._done:
            return
        self._done = True
        from megatron.core.utils import unwrap_model

        from megatron_adacc.megatron import base_layers

        chunks = unwrap_model(model)
        args = self._args
        sequences = _sequences(args) if args.adacc_base in CALIBRATED else None
        weights = {id(p): (weakref.ref(p), p.nbytes) for chunk in chunks for p in chunk.parameters()}
        with base_layers.without_gathering(model):
            made = base_layers.quantize(chunks, args.adacc_base, sequences, args.micro_batch_size)
        gc.collect()
        kept = {id(p) for chunk in chunks for p in chunk.parameters()}
        gone = [each for key, each in weights.items() if key not in kept]
        before, after = sum(size for _, size in gone), sum(weight.nbytes for weight in made.values())
        say(
            f"the base's {len(made)} linear layers of rank 0 are in {args.adacc_base}: {after / 2**20:.2f} MiB in "
            f"place of {before / 2**20:.2f} MiB{_rounding(made)}"
        )
        alive = sum(reference() is not None for reference, _ in gone)
        if alive:
            say(f"{alive} of their weights are still held by something else, and their memory is not free")


def _rounding(made: dict[str, Any]) -> str:
    errors = [weight.rounded_errors for weight in made.values() if hasattr(weight, "rounded_errors")]
    if not errors:
        return ""
    mean, nearest = (sum(pair[i] for pair in errors) / len(errors) for i in (0, 1))
    better = sum(error < other for error, other in errors)
    return (
        f"; squared output error {mean:.3g} on the calibration text where round-to-nearest has {nearest:.3g}, lower on "
        f"{better} of {len(errors)}"
    )


def _sequences(args: Namespace) -> Tensor:
    """Token ids of --adacc-base-text: int64 [sequences, --seq-length] on the host. Raises UserError where they do not
    fill one sequence."""
    import torch

    wanted = SEQUENCES * args.seq_length
    ids: list[int] = []
    for some in _tokens(args.adacc_base_text):
        ids += some
        if len(ids) >= wanted:
            break
    count = min(len(ids), wanted) // args.seq_length
    if count == 0:
        raise UserError(
            f"--adacc-base-text {args.adacc_base_text} has {len(ids)} tokens, but one sequence has {args.seq_length} "
            "(--seq-length): give a longer text."
        )
    # The device is named, because a bridge may send tensors without one elsewhere.
    return torch.tensor(ids[: count * args.seq_length], dtype=torch.int64, device="cpu").view(count, -1)


def _tokens(path: str) -> Iterator[list[int]]:
    """Token ids of a text file, or of each line's "text" in JSON lines; each document ends with the end of document, if
    the tokenizer has one."""
    from megatron.training import get_tokenizer

    from megatron_adacc.megatron.documents import Corpus, Skipped, find_sources, pieces

    tokenizer = get_tokenizer()
    try:
        end = [int(tokenizer.eod)]
    except (AttributeError, NotImplementedError, TypeError):
        end = []
    skipped = Skipped()
    # No folder is left out: nothing is written.
    sources = find_sources([path], f"{path}.none", skipped)
    for text in Corpus(sources, "text", skipped).scan(lambda _: None):
        for piece in pieces(text):
            yield list(tokenizer.tokenize(piece))
        yield end
    if skipped.counts:
        say(f"of --adacc-base-text, what is no text was left out: {skipped.summary()}")
