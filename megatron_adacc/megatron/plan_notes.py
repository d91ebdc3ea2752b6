"""What a plan file was made for, written into its notes, and compared when a run loads it.

A plan was solved for the bytes and times of one model, layout, micro-batch and precision: elsewhere it may not fit, or
not name the right tensors.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_adacc import __version__, codecs
from megatron_adacc.errors import UserError
from megatron_adacc.planner import Compress, Plan

_VERSION = "megatron-adacc"


def _flag(name: str, default: Any = None) -> Callable[[Namespace], str]:
    return lambda args: str(getattr(args, name, default) if getattr(args, name, default) is not None else default)


def _precision(args: Namespace) -> str:
    return "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"


# note -> what it is in Megatron's validated arguments. The first difference is the one that is named.
_FACTS: Mapping[str, Callable[[Namespace], str]] = {
    "num-layers": _flag("num_layers"),
    "hidden-size": _flag("hidden_size"),
    "ffn-hidden-size": _flag("ffn_hidden_size"),
    "num-attention-heads": _flag("num_attention_heads"),
    "num-query-groups": lambda args: str(
        args.num_query_groups if args.group_query_attention else args.num_attention_heads
    ),
    "kv-channels": _flag("kv_channels"),
    "normalization": _flag("normalization"),
    "seq-length": _flag("seq_length"),
    "micro-batch-size": _flag("micro_batch_size"),
    "precision": _precision,
    "tensor-model-parallel-size": _flag("tensor_model_parallel_size", 1),
    "sequence-parallel": _flag("sequence_parallel", False),
    "pipeline-model-parallel-size": _flag("pipeline_model_parallel_size", 1),
    "virtual-pipeline-model-parallel-size": _flag("virtual_pipeline_model_parallel_size", 1),
    "context-parallel-size": _flag("context_parallel_size", 1),
}


def notes_of(args: Namespace, device: str) -> tuple[tuple[str, str], ...]:
    """The notes of a plan for the job of these arguments, predicted for this device."""
    facts = tuple((name, fact(args)) for name, fact in _FACTS.items())
    return (*facts, (_VERSION, __version__), ("device", device))


def check_plan(plan: Plan, path: str, args: Namespace) -> None:
    """Raises UserError for a plan file of another job or version (see check_notes), and for a codec, an option or a
    value that does not exist."""
    check_notes(plan, path, args)
    for action in {action for layer in plan.layers for _, action in layer.actions}:
        if isinstance(action, Compress):
            try:
                codecs.get(action.codec, **dict(action.options))
            except UserError as error:
                raise UserError(f"The plan file {path} cannot be used: {error}") from None


def check_notes(plan: Plan, path: str, args: Namespace) -> None:
    """Raises UserError, naming the first difference, where the plan was made for another job than that of these
    validated arguments, or by another version. What its notes do not say is not looked at; nor is the device."""
    notes = dict(plan.notes)
    for name, fact in _FACTS.items():
        if name in notes and notes[name] != fact(args):
            raise UserError(
                f"The plan file {path} was made for {name} {notes[name]}, but this run has {fact(args)}: make the plan "
                "again with adacc plan and this run's flags."
            )
    if notes.get(_VERSION, __version__) != __version__:
        raise UserError(
            f"The plan file {path} was made by {_VERSION} {notes[_VERSION]}, and this is {__version__}: make the plan "
            "again with adacc plan."
        )
