"""What Megatron finds out late, or in a traceback, is looked at before anything starts."""

import importlib.util
import os
import struct
import tempfile
from argparse import Namespace
from typing import Any

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.plan_notes import check_plan
from megatron_adacc.planner import Plan

# Enough to meet the large ids of a tokenizer, little enough to read at once.
_TOKENS_LOOKED_AT = 1_000_000


def check_arguments(args: Namespace) -> None:
    """Look at validated arguments. Raises UserError for a plan file of another job, a missing package, a missing
    data set and a vocabulary that does not fit."""
    if os.path.isfile(args.adacc_plan):
        check_plan(Plan.load(args.adacc_plan), args.adacc_plan, args)
    _check_packages(args)
    _check_data(args)
    _check_evaluation(args)
    _check_split(args)
    _check_vocabulary(args)
    if args.adacc_report is not None:
        _check_report(args.adacc_report)


def _check_report(path: str) -> None:
    if os.path.isdir(path):
        raise UserError(f"--adacc-report {path} is a folder: name a file in it.")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--adacc-report {path} cannot be written: {error.strerror} ({folder}).") from error


def _check_packages(args: Namespace) -> None:
    if getattr(args, "use_megatron_fsdp", False) and importlib.util.find_spec("einops") is None:
        raise UserError("--use-megatron-fsdp needs the package einops, which is missing: pip install einops.")


def refuse_jobs_of_upstream(args: Namespace) -> None:
    """UserError for the jobs that our pretrain_gpt.py leaves to upstream's script."""
    for name, flag in (("sft", "--sft"), ("fim_data", "--fim-data"), ("logits_load_dir", "--logits-load-dir")):
        if getattr(args, name, None):
            raise UserError(
                f"{flag} is a job of upstream's own script: run it as `adacc run <Megatron-LM>/pretrain_gpt.py` "
                "with the same flags."
            )


def _prefixes(args: Namespace) -> list[tuple[str, str]]:
    """(what names it, path without suffix) of every data set of the run that lies on a disk of this machine."""
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.mock_data or getattr(args, "enable_msc", False) or args.object_storage_cache_path is not None:
        return []
    names = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    given = [name for name in (*names, "per_split_data_args_path") if getattr(args, name) is not None]
    flag = "--" + given[0].replace("_", "-") if given else "--data-path"
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{flag} {getattr(args, given[0])} cannot be read as a list of data sets: {error}.") from error
    return [(flag, prefix) for part in (blend, *(per_split or ())) if part is not None for prefix in part[0]]


def _open(flag: str, prefix: str) -> Any:
    """The data set; UserError where its files are not Megatron's."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    try:
        return IndexedDataset(prefix)
    except (AssertionError, ValueError, OSError, EOFError, struct.error) as error:
        raise UserError(
            f"{flag} names {prefix}, but {prefix}.idx and .bin cannot be read as a Megatron data set ({error}): copy "
            "or make them again."
        ) from error


def _check_data(args: Namespace) -> None:
    for flag, prefix in _prefixes(args):
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.exists(prefix + suffix)]
        if missing:
            raise UserError(
                f"{flag} names {prefix}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: "
                "give the path of a data set without its suffix, or make one with `adacc prepare-data`."
            )


def _check_evaluation(args: Namespace) -> None:
    if args.eval_interval is None and not args.full_validation and not args.skip_train:
        raise UserError(
            "--eval-interval is missing, and Megatron needs it even where --eval-iters is 0: give for example "
            "--eval-interval 1000."
        )


def _check_split(args: Namespace) -> None:
    """Megatron counts epochs of an empty set for ever, without a word."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    if args.split is None or (args.data_path is None and args.data_args_path is None):
        return
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
    for flag, prefix in _prefixes(args):
        documents = len(_open(flag, prefix))
        sets = (("training", 1), ("validation", args.eval_iters), ("test", args.eval_iters))
        for (name, asked), part in zip(sets, parts, strict=True):
            # The bounds as Megatron rounds them.
            if part is not None and asked and round(part[0] * documents) == round(part[1] * documents):
                raise UserError(
                    f"--split {args.split} leaves the {name} set of {flag} {prefix} without one of its {documents} "
                    "documents: give another --split, or --eval-iters 0 to do without evaluation."
                )


def _check_vocabulary(args: Namespace) -> None:
    """A token beyond the embedding's last row is an index error in the middle of a step, or garbage on a GPU."""
    from megatron.training import get_tokenizer

    size, rows = getattr(get_tokenizer(), "vocab_size", None), args.padded_vocab_size
    if size is not None and rows is not None and size > rows:
        raise UserError(
            f"The tokenizer has {size} entries, but the model's vocabulary has {rows}: raise or leave out "
            "--padded-vocab-size."
        )
    if size is not None and args.vocab_size is not None and args.vocab_size > size + 1:
        raise UserError(
            f"--vocab-size is {args.vocab_size}, but the tokenizer {args.tokenizer_model or args.tokenizer_type} has "
            f"{size} entries: leave --vocab-size out."
        )
    for flag, prefix in _prefixes(args):
        data = _open(flag, prefix)
        seen = largest = 0
        for index in range(len(data)):
            document = data[index]
            seen += len(document)
            largest = max(largest, int(document.max(initial=0)))
            if seen >= _TOKENS_LOOKED_AT:
                break
        if rows is not None and largest >= rows:
            raise UserError(
                f"{flag} {prefix} holds token {largest}, but the model's vocabulary has {rows} entries: the data was "
                "made with another, larger tokenizer than --tokenizer-model."
            )
