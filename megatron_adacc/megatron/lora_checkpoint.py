"""Checkpoints of a job with adapters: the base is one, the adapters with their optimizer are another.

    --pretrained-checkpoint BASE --load DIR --save DIR     the base from BASE; DIR's adapters go on if it has some
    --load BASE                                            a new training beside the base in BASE

A checkpoint of adapters holds what Megatron's holds, but of the model A and B alone; its arguments say so
(adacc_lora_rank). What a checkpoint lacks is taken from the model as it is, so that Megatron loads strictly; Megatron
itself goes on without the missing part where strict loading fails.
"""

from __future__ import annotations

import contextlib
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from megatron_adacc.adapters.lora import compare_state, is_adapter
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.console import say

_OF_ADAPTERS = ("rank", "alpha", "targets")


def _model_keys(state_dict: dict[str, Any]) -> list[str]:
    return [key for key in state_dict if re.fullmatch(r"model\d*", key)]


def _rank_in(state_dict: dict[str, Any]) -> int | None:
    return getattr(state_dict.get("args"), "adacc_lora_rank", None)


def refuse_adapters(load_dir: str, args: Namespace, state_dict: dict[str, Any], look: bool) -> None:
    """Raises UserError where a job without adapters reads a checkpoint of adapters, which has no base."""
    if _rank_in(state_dict) is not None:
        raise UserError(
            f"{load_dir} holds LoRA adapters without their base: give --pretrained-checkpoint with the base, and "
            "--adacc-lora-rank and its other flags as when they were trained; adacc evaluate needs --base alone."
        )


class LoraCheckpoints:
    """Reads bases and adapters for one job, and writes adapters."""

    def __init__(self) -> None:
        # While a checkpoint is read: this rank's model chunks, and whether it is the base.
        self._model: list[Any] | None = None
        self._base = False

    def load(self, original: Callable, positional: tuple, named: dict[str, Any]) -> Any:
        """In place of Megatron's load_checkpoint: the base, and then the adapters that --load has.

        Raises UserError where there is no base, and for a checkpoint that is not what its flag says."""
        from megatron.core.utils import unwrap_model
        from megatron.training import get_args
        from megatron.training.checkpointing import checkpoint_exists

        args = get_args()
        base_flag = "pretrained_checkpoint" if args.pretrained_checkpoint is not None else "load"
        base = getattr(args, base_flag)
        if not checkpoint_exists(base):
            raise UserError(
                f"--{base_flag.replace('_', '-')} {base} has no checkpoint: adapters need that of their base."
            )
        model = unwrap_model(positional[0])
        resumed = base_flag != "load" and checkpoint_exists(args.load)
        with self._reading(model, base=True), _as_new(args, resumed):
            result = original(*positional, **{**named, "load_arg": base_flag})
        say(f"the base is that of {base}; adapters " + (f"go on from {args.load}" if resumed else "start anew"))
        if resumed:
            with self._reading(model, base=False):
                result = original(*positional, **named)
        return result

    @contextlib.contextmanager
    def _reading(self, model: list[Any], base: bool) -> Iterator[None]:
        self._model, self._base = model, base
        try:
            yield
        finally:
            self._model, self._base = None, False

    def generated(self, args: Namespace, state_dict: dict[str, Any]) -> None:
        """Leave in a state that is written or filled what belongs there: A and B, or the base while that is read."""
        for key in _model_keys(state_dict):
            state_dict[key] = {
                name: value for name, value in state_dict[key].items() if is_adapter(name) is not self._base
            }

    def read(self, load_dir: str, args: Namespace, state_dict: dict[str, Any], look: bool) -> None:
        """Check what was read, and put the rest of the model beside it where it is this rank's part."""
        rank = _rank_in(state_dict)
        if self._base and rank is not None:
            raise UserError(
                f"{load_dir} holds LoRA adapters without their base: name the base with --pretrained-checkpoint, and "
                "them with --load."
            )
        if not self._base:
            if rank is None:
                raise UserError(
                    f"--load {load_dir} is a whole model, but beside --pretrained-checkpoint it must be one of "
                    "adapters: name another --load, or leave one of the two out."
                )
            for name in _OF_ADAPTERS:
                was, now = (getattr(a, f"adacc_lora_{name}", None) for a in (state_dict["args"], args))
                if was != now:
                    raise UserError(
                        f"The adapters in {load_dir} were trained with --adacc-lora-{name} {was}, not {now}: give it "
                        "as it was."
                    )
        if self._model is None or look:
            return
        keys = ["model"] if len(self._model) == 1 else [f"model{i}" for i in range(len(self._model))]
        for key, chunk in zip(keys, self._model, strict=True):
            if key in state_dict:
                state_dict[key] = self._whole(chunk, state_dict[key], load_dir)

    def _whole(self, chunk: Any, found: dict[str, Any], load_dir: str) -> dict[str, Any]:
        """The chunk's own state with what was found in the place of its part."""
        own = chunk.state_dict_for_save_checkpoint()
        tensors = {name: value for name, value in found.items() if not name.endswith("_extra_state")}
        part = {
            name: value
            for name, value in own.items()
            if is_adapter(name) is not self._base and not name.endswith("_extra_state")
        }
        try:
            compare_state(part, tensors, f"{load_dir} and the model")
        except UserError as error:
            raise UserError(f"{load_dir} is not a checkpoint of this model. {error}") from error
        return {**own, **found}


@contextlib.contextmanager
def _as_new(args: Namespace, resumed: bool) -> Iterator[None]:
    """A base brings weights, and neither iteration, optimizer nor random numbers, as with --finetune; that stays so if
    no adapters are loaded after it. Its iteration is its last."""
    finetune, step = args.finetune, args.ckpt_step
    args.finetune = True
    if resumed:
        args.ckpt_step = None
    try:
        yield
    finally:
        args.ckpt_step = step
        if resumed:
            args.finetune = finetune
