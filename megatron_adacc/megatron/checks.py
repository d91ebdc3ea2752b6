"""What Megatron finds out late, or in a traceback, is looked at before anything starts."""

import os
from argparse import Namespace

from megatron_adacc.errors import UserError

# Enough to meet the large ids of a tokenizer, little enough to read at once.
_TOKENS_LOOKED_AT = 1_000_000


def check_arguments(args: Namespace) -> None:
    """Look at validated arguments. Raises UserError for a missing data set and a vocabulary that does not fit."""
    _check_data(args)
    _check_evaluation(args)
    _check_split(args)
    _check_vocabulary(args)
    if args.adacc_report is not None:
        folder = os.path.dirname(os.path.abspath(args.adacc_report))
        if os.path.isdir(args.adacc_report):
            raise UserError(f"--adacc-report {args.adacc_report} is a folder: name a file in it.")
        os.makedirs(folder, exist_ok=True)


def refuse_jobs_of_upstream(args: Namespace) -> None:
    """UserError for the jobs that our pretrain_gpt.py leaves to upstream's script."""
    for name, flag in (("sft", "--sft"), ("fim_data", "--fim-data"), ("logits_load_dir", "--logits-load-dir")):
        if getattr(args, name, None):
            raise UserError(
                f"{flag} is a job of upstream's own script: run it as `adacc run <Megatron-LM>/pretrain_gpt.py` "
                "with the same flags."
            )


def _prefixes(args: Namespace) -> list[tuple[str, str]]:
    """(flag, path without suffix) of every data set that the run names and that lies on a disk of this machine."""
    from megatron.core.datasets.utils import get_blend_from_list

    if args.mock_data or getattr(args, "enable_msc", False) or args.object_storage_cache_path is not None:
        return []
    found = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = get_blend_from_list(getattr(args, name))
        found += [(f"--{name.replace('_', '-')}", prefix) for prefix in (blend[0] if blend is not None else ())]
    return found


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
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if args.split is None or args.data_path is None:
        return
    parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
    for flag, prefix in _prefixes(args):
        documents = len(IndexedDataset(prefix))
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
    from megatron.core.datasets.indexed_dataset import IndexedDataset
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
        data = IndexedDataset(prefix)
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
