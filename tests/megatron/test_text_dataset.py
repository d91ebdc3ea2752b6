"""The tokenizer that Megatron loads, and the token ids that it reads."""

import functools
import os
import random
import socket
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_adacc.megatron import text_dataset

VOCAB = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder as the command writes it."""
    folder = tmp_path_factory.mktemp("made") / "tokenizer"
    text = "The quick brown fox jumps over the lazy dog, and self.assertEqual(self.dog, other.dog).\n"
    text_dataset.save_tokenizer(text_dataset.train_tokenizer([text * 10], VOCAB), folder)
    return folder


def megatron_tokenizer(folder: Path, **changes: object):
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args = SimpleNamespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(folder),
        metadata_path=None,
        chat_template=None,
        vocab_file=None,
        merge_file=None,
        special_tokens=None,
        tokenizer_hf_no_use_fast=False,
        tokenizer_hf_no_include_special_tokens=False,
        trust_remote_code=False,
        pad_vocab_size=True,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        rank=0,
    )
    for name, value in changes.items():
        setattr(args, name, value)
    return build_tokenizer(args), args


@functools.cache
def cached_tokenizer(folder: Path):
    return megatron_tokenizer(folder)[0]


def read_back(output: Path) -> list[np.ndarray]:
    from megatron.core.datasets import indexed_dataset

    data = indexed_dataset.IndexedDataset(str(output / "text_document"))
    assert data.document_indices.tolist() == list(range(len(data) + 1))
    return [np.array(data[number]) for number in range(len(data))]


def test_megatron_loads_the_tokenizer_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a connection was tried: {arguments}")

    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer, args = megatron_tokenizer(folder)
    assert (tokenizer.eod, tokenizer.eos, tokenizer.bos, tokenizer.pad) == (0, 0, 0, 1)
    assert tokenizer.vocab_size == VOCAB
    assert args.padded_vocab_size == 384
    # In a prompt the end of a document is one token, unlike in a document.
    assert tokenizer.tokenize("<|endoftext|>") == [0]


@pytest.mark.parametrize("include_special", [True, False])
def test_source_text_survives_megatrons_tokenizer(folder: Path, include_special: bool):
    tokenizer, _ = megatron_tokenizer(folder, tokenizer_hf_no_include_special_tokens=not include_special)
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()[:20_000]
    assert tokenizer.detokenize(tokenizer.tokenize(source)) == source


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_megatrons_tokenizer(folder: Path, text: str):
    tokenizer = cached_tokenizer(folder)
    ids = tokenizer.tokenize(text)
    assert all(0 <= token < VOCAB for token in ids)
    assert tokenizer.detokenize(ids) == text


def test_the_number_of_tokens_decides_the_type_of_the_ids(tmp_path: Path):
    for vocab_size, name, itemsize in ((65_499, "uint16", 2), (65_500, "int32", 4)):
        ids = np.array([1, vocab_size - 1, 0], dtype=np.int32)
        prefix = tmp_path / str(vocab_size) / "text_document"
        prefix.parent.mkdir()
        assert text_dataset.write(prefix, [ids, ids[1:]], vocab_size) == (5, name)
        assert prefix.with_suffix(".bin").stat().st_size == 5 * itemsize
        assert [document.tolist() for document in read_back(prefix.parent)] == [ids.tolist(), ids[1:].tolist()]


def test_a_long_document_is_encoded_in_batches_and_stays_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_dataset, "_BATCH_CHARS", 1000)
    monkeypatch.setattr(text_dataset, "pieces", lambda text: [text[at : at + 300] for at in range(0, len(text), 300)])
    tokenizer = text_dataset.train_tokenizer(["ab " * 50], VOCAB)
    texts = ["long " * 1000, "short", "x" * 299, "y" * 1200]
    documents = list(text_dataset.encode(iter(texts), tokenizer))
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in documents] == texts
    assert [int(ids[-1]) for ids in documents] == [0] * 4


def test_training_does_not_stall_on_a_word_without_end():
    # Quadratic, this took minutes; cut into words of a thousand letters it takes a second or two.
    text = "".join(random.Random(0).choices("acgt", k=300_000))
    started = time.monotonic()
    tokenizer = text_dataset.train_tokenizer([text], 400)
    assert time.monotonic() - started < 60
    assert tokenizer.get_vocab_size() == 400
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
