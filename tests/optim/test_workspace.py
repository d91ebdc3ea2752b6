"""What a step needs beside the state that it keeps."""

import pytest
import torch
from torch import nn

from megatron_adacc.optim import BlockAdamW
from megatron_adacc.runtime.cpu_peak import CpuPeak

CHUNK_BYTES = 64 * 256 * 4  # float32 of 64 blocks


@pytest.fixture
def peak():
    meter = CpuPeak()
    yield meter
    meter.close()


@pytest.mark.parametrize("bits", [8, "mixed"])
def test_a_step_never_holds_float32_of_more_than_a_chunk(bits, peak):
    parameter = nn.Parameter(torch.randn(1 << 20).to(torch.bfloat16))
    optimizer = BlockAdamW([parameter], bits=8, chunk_blocks=64, implementation="torch")
    if bits == "mixed":
        optimizer.set_layout(parameter, torch.tensor([32, 16, 8, 4])[torch.arange(4096) % 4])
    parameter.grad = torch.randn(1 << 20).to(torch.bfloat16)
    optimizer.step()
    peak.start()
    before, _ = peak.stop()
    peak.start()
    optimizer.step()
    others = peak.stop()[0] - before
    # A few dozen temporaries of one chunk (65 KB each); m and v in float32 would be 8 MB.
    assert 0 < others < 40 * CHUNK_BYTES < 8 * parameter.numel() / 3
