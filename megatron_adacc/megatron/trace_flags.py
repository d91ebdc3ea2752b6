"""From the command line of a training job to that of a model of one layer, for `adacc trace`."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_adacc.errors import UserError

# The flags of a training job that do not reach into a layer, by the number of their values. They are left out,
# so that a job's whole command line can be given on a machine without its data, cluster or tokenizer.
_JOB_FLAGS: dict[str | int, str] = {
    0: "mock-data use-checkpoint-args",
    1: (
        "data-args-path per-split-data-args-path split data-cache-path tokenizer-type tokenizer-model vocab-size "
        "vocab-file merge-file padded-vocab-size num-layers global-batch-size mtp-num-layers moe-layer-freq load save "
        "pretrained-checkpoint tensorboard-dir wandb-project train-iters train-samples adacc-report eval-interval "
        "pipeline-model-parallel-size pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage "
        "num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
        "lr-warmup-iters lr-warmup-samples lr-decay-iters lr-decay-samples lr-wsd-decay-iters lr-wsd-decay-samples"
    ),
    "*": "data-path train-data-path valid-data-path test-data-path rampup-batch-size",
}

# What splits a layer over processes.
_SPLITS = ("--tensor-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size")

# In place of the job's: a model of one layer with a small vocabulary, which the layer does not see.
_IN_THEIR_PLACE = (
    *("--num-layers", "1", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "127"),
    *("--train-iters", "1", "--eval-interval", "1000"),
)

_DEFAULTS = {"--micro-batch-size": "1", "--seq-length": "256", "--lr": "1e-3"}
_REQUIRED = ("--hidden-size", "--num-attention-heads")


def parse_known(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """What `parser` knows, and the arguments that it does not. UserError for a value that it cannot take."""
    try:
        return parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        program = parser.prog if parser.add_help else "adacc trace"
        raise UserError(f"{error} (see {program} --help).") from None


def flags_of_file(path: str) -> list[str]:
    """A YAML of Megatron's settings by name, as command-line flags. UserError where it is none."""
    import yaml

    try:
        settings = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"The config {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The config {path} is no YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(settings, dict):
        raise UserError(f"The config {path} must hold Megatron's flags by name, as in `hidden-size: 256`.")
    tokens: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        tokens += [f"--{str(name).replace('_', '-')}", *map(str, values)]
    return tokens


def model_flags(given: Sequence[str]) -> list[str]:
    """Megatron's flags for one layer of the model that `given` describes, small defaults filled in.

    Raises UserError where the layer's size is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for values, flags in _JOB_FLAGS.items():
        how: dict[str, Any] = {"action": "store_true"} if values == 0 else {"nargs": None if values == 1 else values}
        for flag in flags.split():
            parser.add_argument(f"--{flag}", **how)
    for flag in _SPLITS:
        parser.add_argument(flag, dest=flag, type=int, default=1)
    left_out, kept = parse_known(parser, given)
    for flag in _SPLITS:
        if vars(left_out)[flag] != 1:
            raise UserError(
                f"{flag} {vars(left_out)[flag]} needs as many processes, and adacc trace runs in one: leave it out to "
                "see the layer as a rank holds it that shares it with no other."
            )
    return [*completed(kept, "adacc trace", "configs/gpt_demo.yaml", _REQUIRED), *_IN_THEIR_PLACE]


def completed(kept: Sequence[str], reader: str, example: str, required: Sequence[str]) -> list[str]:
    """The flags of a model with small defaults, and positions for the whole sequence, where nothing was given.

    Raises UserError, in which ``reader`` reads them and ``example`` is a config, where one of the flags ``required``
    is missing."""
    flags = list(kept)
    names = {token.split("=")[0] for token in flags if token.startswith("--")}
    if "--yaml-cfg" in names:
        raise UserError(f"{reader} takes Megatron's settings as flags or by --config, not by --yaml-cfg.")
    missing = [name for name in required if name not in names]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: give the model by Megatron's "
            f"flags, or by --config with a file such as {example}."
        )
    for name, value in _DEFAULTS.items():
        if name not in names:
            flags += [name, value]
    if "--max-position-embeddings" not in names:
        sequence = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        sequence.add_argument("--seq-length")
        flags += ["--max-position-embeddings", parse_known(sequence, flags)[0].seq_length]
    return flags
