"""Documents to what Megatron trains on: a tokenizer folder, and token ids in a .bin and .idx pair.

    texts --train_tokenizer--> tokenizer --save_tokenizer--> what --tokenizer-model names
    texts, tokenizer --encode--> ids of each document, ended by EOD --write--> what --data-path names

The tokenizers library uses all cores, or as many as RAYON_NUM_THREADS and TOKENIZERS_PARALLELISM allow; they are
left as the user set them, because nothing here forks.
"""

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_adacc.megatron.documents import pieces

END_OF_DOCUMENT = "<|endoftext|>"
# A token of its own: Megatron's GPT data set takes no loss on padding, so sharing the end of document's id
# would either stop the model from learning where documents end or make Megatron warn and ignore it.
PADDING = "<|padding|>"
EOD_ID, PAD_ID = 0, 1
# Every byte has an id, so that any text can be encoded and comes back exactly.
MIN_VOCAB_SIZE = 256 + 2
# The trainer reserves some 70 bytes an entry before it starts, and the process is aborted if it cannot.
MAX_VOCAB_SIZE = 1_000_000
# Characters that are encoded in one call, on all cores. An encoding takes some 100 bytes a token.
_BATCH_CHARS = 2**20
# A word of the length at which training cuts it, with more of it to come.
_LONG_WORD = re.compile(r"(\S{1000})(?=\S)")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries: EOD, padding, 256 bytes, then merges.

    It has fewer entries where `texts` do not repeat themselves enough to give so many merges. The same texts
    give the same tokenizer, whatever the number of threads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (END_OF_DOCUMENT, PADDING)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Training takes time quadratic in the length of a word: a megabyte without a space would take for ever.
    short = (_LONG_WORD.sub(r"\1 ", piece) for text in texts for piece in pieces(text))
    tokenizer.train_from_iterator(short, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files from which transformers' AutoTokenizer, and so Megatron, loads it offline.

    Raises:
        OSError: the folder cannot be made, or the device is full.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_DOCUMENT,
        "eos_token": END_OF_DOCUMENT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,  # True would take out spaces before punctuation when decoding.
        "model_max_length": 10**30,  # What transformers itself writes for "no limit".
    }
    folder.mkdir()
    # Written here and not by tokenizer.save(), whose errors are not OSErrors.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The token ids of each text, int32 [tokens + 1], the last of them EOD_ID.

    A text that contains "<|endoftext|>" is text: it is spelt out, and does not end the document.
    """
    tokenizer.encode_special_tokens = True
    end = np.array([EOD_ID], dtype=np.int32)
    parts: list[np.ndarray] = []
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
        for (_, ends), encoding in zip(batch, encodings, strict=True):
            parts.append(np.array(encoding.ids, dtype=np.int32))
            if ends:
                yield np.concatenate([*parts, end])
                parts.clear()


def write(prefix: Path, documents: Iterable[np.ndarray], vocab_size: int) -> tuple[int, str]:
    """Write `prefix`.bin and `prefix`.idx with Megatron's own builder: (tokens in all, name of their dtype).

    Raises:
        OSError: the files cannot be written, or the device is full.
    """
    indexed_dataset = _import_indexed_dataset()
    dtype = indexed_dataset.DType.optimal_dtype(vocab_size)
    tokens = 0
    builder = indexed_dataset.IndexedDatasetBuilder(indexed_dataset.get_bin_path(str(prefix)), dtype=dtype)
    with contextlib.closing(builder.data_file):
        for ids in documents:
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
        builder.finalize(indexed_dataset.get_idx_path(str(prefix)))
    return tokens, np.dtype(dtype).name


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of texts, each with whether its text ends there, about _BATCH_CHARS characters at a time."""
    batch: list[tuple[str, bool]] = []
    chars = 0
    for text in texts:
        left = len(text)
        for piece in pieces(text):
            left -= len(piece)
            chars += len(piece)
            batch.append((piece, left == 0))
            if chars >= _BATCH_CHARS:
                yield batch
                batch, chars = [], 0
    if batch:
        yield batch


def _import_indexed_dataset() -> Any:
    """Megatron's module, without what the import of all of megatron.core says about optimizers and CUDA."""

    def not_about_cuda(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No CUDA runtime is found")

    extension_logger = logging.getLogger("torch.utils.cpp_extension")
    extension_logger.addFilter(not_about_cuda)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
            warnings.filterwarnings("ignore", message="The following imports from `dynamic_context.py`")
            from megatron.core.datasets import indexed_dataset
    finally:
        extension_logger.removeFilter(not_about_cuda)
    return indexed_dataset
