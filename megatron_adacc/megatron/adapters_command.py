"""`adacc adapters export`: adapters that were trained in Megatron, for PEFT, merged into their base, or both.

    adacc adapters export --checkpoint ADAPTERS -o OUT                           a PEFT adapter
    adacc adapters export --checkpoint ADAPTERS --base BASE --merged -o OUT      a checkpoint that Megatron loads
    adacc adapters export --checkpoint ADAPTERS --base BASE --merged --format huggingface -o OUT
    adacc adapters export --base BASE --format huggingface -o OUT                the base alone

Checkpoints of formats torch and torch_dist are read whole, whatever ranks wrote them; no job is started, and no GPU is
needed.
"""

from __future__ import annotations

import argparse
import os
import warnings
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_adacc.atomic import atomic_folder, sole_writer
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.console import say

if TYPE_CHECKING:
    from megatron_adacc.megatron.checkpoint_files import Files
    from megatron_adacc.megatron.checkpoint_merge import Adapters

PROGRAM = "adacc adapters"
FORMATS = ("peft", "megatron", "huggingface")


def configure(parser: argparse.ArgumentParser) -> None:
    """The sub-command's options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write adapters in a form that others read")
    export.description = (
        "Write adapters that --adacc-lora-rank trained as a PEFT adapter, or merge them into their base: a checkpoint "
        "that Megatron loads, or a model of transformers."
    )
    export.add_argument("--checkpoint", metavar="DIR", help="adapters, as --save wrote them")
    export.add_argument("--base", metavar="DIR", help="their base (default: where it was when they were trained)")
    export.add_argument("--merged", action="store_true", help="base and adapters in one")
    export.add_argument(
        "--format", choices=FORMATS, help="default: peft, or with --merged megatron; huggingface is a whole model"
    )
    export.add_argument("--iteration", type=int, metavar="N", help="of --checkpoint (default: the last)")
    export.add_argument(
        "--base-name", metavar="NAME", help="for PEFT: name or folder of the base that peft loads them beside"
    )
    export.add_argument("-o", "--output", required=True, metavar="DIR", help="a folder that is not there, or is empty")


def run(args: Namespace) -> int:
    """Export. Raises UserError for a mistake in the options, and for checkpoints that do not fit together."""
    _check(args)
    from megatron_adacc.megatron import launch

    # Before Megatron is imported, whose types the checkpoints hold.
    launch.prepare(PROGRAM, [])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        said = _export(args)
    print(said)  # noqa: T201
    return 0


def _check(args: Namespace) -> None:
    if args.format is None:
        args.format = "megatron" if args.merged else "peft"
    if args.checkpoint is None and (args.merged or args.format != "huggingface" or args.base is None):
        raise UserError("--checkpoint is missing: it names the adapters. Without any, --base and --format huggingface.")
    if args.merged and args.format == "peft":
        raise UserError("--merged makes a whole model, and --format peft an adapter: leave one of them out.")
    if args.checkpoint is not None and not args.merged and args.format != "peft":
        raise UserError(
            f"--format {args.format} writes a whole model: add --merged, or leave --checkpoint out for the base."
        )
    if args.base_name is not None and args.format != "peft":
        raise UserError("--base-name goes with --format peft.")
    if args.base is not None and args.format == "peft":
        raise UserError("--base is not read for --format peft: leave it out; --base-name says what peft loads.")
    target = Path(args.output)
    if not target.parent.is_dir():
        raise UserError(f"{target} cannot be written: its folder does not exist.")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} is there already: name another folder, or remove it.")


def _export(args: Namespace) -> str:
    from megatron_adacc.megatron import checkpoint_files, checkpoint_merge, hugging_face

    adapters = None if args.checkpoint is None else read_adapters(args.checkpoint, args.iteration)
    base = None if args.format == "peft" else _base(args.base, adapters[0] if adapters else None)
    if base is not None and adapters is not None:
        _say_other_base(adapters[1])
    with sole_writer(args.output), atomic_folder(args.output) as folder:
        if args.format == "peft":
            assert adapters is not None
            files, found = adapters
            hugging_face.write_peft(found.state, files.args, args.base_name, folder)
        elif args.format == "megatron":
            assert adapters is not None
            assert base is not None
            checkpoint_merge.write(base, adapters[1], folder)
        else:
            assert base is not None
            state = checkpoint_files.whole_model(base)
            if adapters is not None:
                state = {name: adapters[1].merge(name, tensor) for name, tensor in state.items()}
                adapters[1].check_all_merged()
            hugging_face.write_model(state, base.args, folder)
    names = os.listdir(args.output)
    return f"{args.output}: {', '.join(sorted(names))}"


def read_adapters(checkpoint: str, iteration: int | None) -> tuple[Files, Adapters]:
    """The adapters in a checkpoint. Raises UserError where it is none of adapters."""
    from megatron_adacc.adapters.lora import is_adapter
    from megatron_adacc.megatron import checkpoint_files
    from megatron_adacc.megatron.checkpoint_merge import Adapters

    files = checkpoint_files.find(checkpoint, iteration)
    rank = getattr(files.args, "adacc_lora_rank", None)
    state = {} if rank is None else checkpoint_files.whole_model(files, is_adapter)
    if not state:
        raise UserError(f"{checkpoint} holds no adapters: --checkpoint names what a job with --adacc-lora-rank saved.")
    return files, Adapters(state, files.args)


def _say_other_base(adapters: Adapters) -> None:
    """A merged model is not quite what was trained where the base's bits then cannot be made again: say so."""
    if not adapters.base_is_known:
        say(
            f"the adapters were trained beside a base in {adapters.base_format}; they are merged into its weights as "
            "the checkpoint has them, so that outputs differ by what the fewer bits rounded away"
        )


def _base(given: str | None, adapters: Files | None) -> Files:
    from megatron_adacc.megatron import checkpoint_files

    if given is None:
        assert adapters is not None
        given = adapters.args.pretrained_checkpoint or adapters.args.load
        if given is None or not Path(given).is_dir():
            raise UserError(f"The base of the adapters was {given}, which is not there: name it with --base.")
    files = checkpoint_files.find(given)
    if getattr(files.args, "adacc_lora_rank", None) is not None:
        raise UserError(f"--base {given} holds adapters, but it must be the whole model that they were trained beside.")
    return files
