"""From a training job's command line to the arguments of one of its ranks, for a device that is not there.

What needs a CUDA extension cannot be traced without one. It is replaced by what Megatron does where the extension is
missing, and each replacement is told in a sentence: the layer on the real device may keep other tensors.
"""

import argparse
import dataclasses
import inspect
import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.flags import AdaccFlags
from megatron_adacc.megatron.read_job import connections_of
from megatron_adacc.megatron.trace_flags import completed, parse_known

# The flags of a job that change neither its layers nor its optimizer, by the number of their values.
_JOB_FLAGS: dict[str | int, str] = {
    0: "mock-data use-checkpoint-args exit-signal-handler log-throughput",
    1: (
        "data-args-path per-split-data-args-path split data-cache-path tokenizer-type tokenizer-model vocab-file "
        "merge-file load save pretrained-checkpoint save-interval tensorboard-dir wandb-project wandb-exp-name "
        "train-iters train-samples eval-interval eval-iters log-interval distributed-backend "
        "lr-warmup-iters lr-warmup-samples lr-decay-iters lr-decay-samples "
        "lr-wsd-decay-iters lr-wsd-decay-samples"
    ),
    "*": "data-path train-data-path valid-data-path test-data-path rampup-batch-size",
}
_IN_THEIR_PLACE = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "1", "--eval-interval", "1000"),
    "--no-gradient-accumulation-fusion",
)

_REQUIRED = ("--num-layers", "--hidden-size", "--num-attention-heads")

# GPT-2's vocabulary, the one of Megatron's GPT examples.
_VOCABULARY = 50257


@dataclass(frozen=True)
class _Extension:
    """args.<name> becomes `value`; `sentence` says what was assumed, where it matters."""

    name: str
    value: Any
    sentence: str
    matters: Callable[[Namespace], bool] = lambda args: True


_EXTENSIONS = (
    _Extension(
        "transformer_impl", "local",
        "The layers are those of --transformer-impl local, with attention unfused: Transformer Engine's kernels keep "
        "fewer attention tensors.",
    ),
    _Extension(
        "use_flash_attn", False,
        "Attention is traced unfused: with --use-flash-attn the probabilities and their dropout mask are not kept.",
    ),
    _Extension(
        "masked_softmax_fusion", False,
        "The softmax is torch's: Megatron's fused softmax keeps the same output, but no mask beside it.",
    ),
    _Extension(
        "apply_rope_fusion", False,
        "Rotary embeddings are traced unfused: the fused kernel keeps only its angles.",
        lambda args: args.position_embedding_type == "rope" or args.use_rotary_position_embeddings,
    ),
    _Extension("tp_comm_overlap", False, "Tensor-parallel communication is not overlapped with products."),
    _Extension("cuda_graph_impl", "none", "No CUDA graphs: they add memory pools of their own."),
)  # fmt: skip
# Traced as Megatron runs without apex; a fused norm keeps what torch's keeps.
_QUIET = {"no_persist_layer_norm": True, "gradient_accumulation_fusion": False, "distributed_backend": "nccl"}

# Functions that Megatron compiles with torch.compile, and what else must hold for them to be used.
_FUSED_FLAGS = {
    "bias_gelu_fusion": ("bias and GELU", lambda args: not args.swiglu),
    "bias_swiglu_fusion": ("bias and SwiGLU", lambda args: args.swiglu),
    "bias_dropout_fusion": ("bias, dropout and add", lambda args: True),
    "cross_entropy_loss_fusion": ("cross entropy", lambda args: True),
}

# What a plan decides, and so is left out.
_RECOMPUTE = {
    "recompute_activations": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
    "distribute_saved_activations": False,
}

_REFUSED = {
    "fp8": ("--fp8-format", "8-bit formats need Transformer Engine"),
    "fp4": ("--fp4-format", "4-bit formats need Transformer Engine"),
    "num_experts": ("--num-experts", "the sizes of an expert's tensors depend on the data"),
    "multi_latent_attention": ("--multi-latent-attention", "it needs Transformer Engine"),
    "mtp_num_layers": ("--mtp-num-layers", "multi-token prediction needs Transformer Engine"),
}


def offline_flags(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Megatron's flags for the model that `given` describes, and sentences about what was assumed.

    Raises UserError where the model's size is not given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for values, flags in _JOB_FLAGS.items():
        how: dict[str, Any] = {"action": "store_true"} if values == 0 else {"nargs": None if values == 1 else values}
        for flag in flags.split():
            parser.add_argument(f"--{flag}", **how)
    for own in dataclasses.fields(AdaccFlags):
        how = {"action": "store_true"} if own.default is False else {}
        parser.add_argument(f"--{own.name.replace('_', '-')}", **how)
    _, kept = parse_known(parser, given)
    kept = completed(kept, "Offline planning", "configs/gpt_345m.yaml", _REQUIRED)
    names = {token.split("=")[0] for token in kept if token.startswith("--")}
    assumed = []
    if not names & {"--vocab-size", "--padded-vocab-size"}:
        kept += ["--vocab-size", str(_VOCABULARY)]
        assumed.append(
            f"The vocabulary is taken to be GPT-2's, {_VOCABULARY:,} entries: give --vocab-size for another."
        )
    return [*kept, *_IN_THEIR_PLACE], assumed


def parallel_sizes(flags: Sequence[str]) -> tuple[int, int]:
    """Tensor and pipeline parallel size. UserError for what is no positive number."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    for name in names:
        parser.add_argument(name, dest=name, type=int, default=1)
    found = vars(parse_known(parser, flags)[0])
    for name in names:
        if found[name] < 1:
            raise UserError(f"{name} is {found[name]}, but at least one rank is needed.")
    tensor, pipeline = (found[name] for name in names)
    return tensor, pipeline


def without_extensions(args: Namespace) -> list[str]:
    """Turn off in `args` what needs a CUDA extension; returns sentences about it. UserError for what has no
    counterpart."""
    for name, (flag, reason) in _REFUSED.items():
        if getattr(args, name, None):
            raise UserError(f"{flag} cannot be planned for a device that is not there: {reason}.")
    for name, flag in (
        ("context_parallel_size", "--context-parallel-size"),
        ("expert_model_parallel_size", "--expert-model-parallel-size"),
    ):
        if getattr(args, name, 1) > 1:
            raise UserError(f"{flag} above 1 cannot be planned for a device that is not there: leave it out.")
    sentences = []
    for extension in _EXTENSIONS:
        if getattr(args, extension.name, extension.value) not in (extension.value, None):
            setattr(args, extension.name, extension.value)
            if extension.matters(args):
                sentences.append(extension.sentence)
    for name, value in _QUIET.items():
        setattr(args, name, value)
    if any(getattr(args, name, value) != value for name, value in _RECOMPUTE.items()):
        sentences.append("Megatron's own recompute flags are left out: a plan decides what is recomputed.")
        vars(args).update(_RECOMPUTE)
    return sentences


def fused_functions(args: Namespace) -> list[str]:
    """A sentence about the functions that run compiled on the device; none where there are none."""
    active = [words for name, (words, used) in _FUSED_FLAGS.items() if getattr(args, name, False) and used(args)]
    if not active:
        return []
    return [f"What Megatron compiles ({'; '.join(active)}) is traced op by op."]


def parse(flags: Sequence[str], world_size: int, rank: int) -> tuple[Namespace, list[str]]:
    """Megatron's validated arguments for one rank, and what was assumed. To be called inside `absent_cuda`; writes the
    environment of the rank.

    Raises UserError with Megatron's own words where it refuses them."""
    from megatron.training import arguments

    from megatron_adacc.patches.training_argument_utils import with_sentences

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message} (megatron-core knows no such flag or value).")

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.error = refuse  # type: ignore[method-assign]
        return parser

    command = sys.argv
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        CUDA_DEVICE_MAX_CONNECTIONS=connections_of(flags),
    )
    sys.argv = ["adacc plan", *flags]
    try:
        # Unwrapped: a process that was prepared for the CPU would turn off what a CPU cannot do.
        args = inspect.unwrap(arguments.parse_args)(provider)
        sentences = without_extensions(args)
        with_sentences(inspect.unwrap(arguments.validate_args))(args)
    finally:
        sys.argv = command
    return args, [*sentences, *fused_functions(args)]


def refusal(error: Exception, what: str) -> UserError:
    """What a check of Megatron says, and where it stands, as a sentence that begins with `what`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(frame.filename.split("/")[-3:])
    words = str(error).strip() or f"this does not hold: {(frame.line or '').removeprefix('assert ')}"
    return UserError(f"{what}: {words} ({place}, line {frame.lineno})")
