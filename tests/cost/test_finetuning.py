"""Bytes of frozen weights as they are predicted, and as they are held."""

import pytest
import torch

from megatron_adacc.adapters import frozen
from megatron_adacc.cost import finetuning
from megatron_adacc.cost.static_memory import Training
from megatron_adacc.errors import UserError


@pytest.mark.parametrize("shape", [(48, 96), (33, 51), (5, 700)])
@pytest.mark.parametrize("format", finetuning.FORMATS[1:])
def test_bytes_of_a_weight_are_those_that_it_holds(format, shape):
    weight = torch.randn(shape)
    more = {"int8": [torch.empty(0, dtype=torch.int64)], "gptq4": [torch.eye(shape[1])]}.get(format, [])
    assert finetuning.weight_bytes(format, *shape, 4) == frozen.FORMATS[format](weight, *more).nbytes


def test_the_formats_are_those_of_adapters():
    assert ("16bit", *frozen.FORMATS) == finetuning.FORMATS
    assert finetuning.weight_bytes("16bit", 3, 5, 2) == 30


@pytest.mark.parametrize(
    ("format", "rank", "training", "words"),
    [
        ("nf5", 4, Training("bf16"), "the known formats are 16bit"),
        ("nf4", 0, Training("bf16"), "rank of an adapter is 0"),
        ("nf4", 4, Training("bf16", zero=3, data_parallel=2), "--zero must be 0 or 1"),
    ],
)
def test_what_cannot_be_meant(format, rank, training, words):
    with pytest.raises(UserError, match=words):
        finetuning.of_parameters(1000, format, rank, training)
