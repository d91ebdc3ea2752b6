"""statistics: partial sums of |x| for each channel.

    partial[p, c] = sum of |x[r, c]| over the rows r of chunk p, inf and NaN counted as zero

| pointer | type                    | shape              |                                  |
|---------|-------------------------|--------------------|----------------------------------|
| x       | float32, float16, int16 | [rows, channels]   | int16 holds the bits of bfloat16 |
| partial | float32                 | [chunks, channels] |                                  |

One program does ROWS rows of CHANNELS channels. The chunks are summed afterwards, in a fixed order, instead of
with atomic additions: the same tensors give the same statistics, and so the same outlier list, every time.

Example, ROWS 2, rows (1 -2) (3 4) (-5 6):  chunks (4 6) (5 6), sums 9 12.
"""

import torch
import triton
import triton.language as tl

from .launch import aligned, device_of, raw
from .symmetric import finite_or_zero, to_float

ROWS_A_CHUNK = 512
ROWS_AT_ONCE = 16
CHANNELS = 128


@triton.jit(do_not_specialize=["rows", "channels"])
def partial_sums_kernel(
    x, partial, rows, channels,
    BF16: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One chunk of rows and CHANNELS channels a program; see the module docstring."""
    chunk = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    total = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    for offset in range(0, CHUNK, ROWS):
        row = chunk * CHUNK + offset + tl.arange(0, ROWS)[:, None]
        value = to_float(tl.load(x + row * channels + channel, (row < rows) & (channel < channels), other=0), BF16)
        total += tl.abs(finite_or_zero(value))
    sums = tl.reduce(total, 0, tl.standard._sum_combine)[None, :]
    tl.store(partial + chunk * channels + channel, sums, channel < channels)


def partial_sums(matrix: torch.Tensor) -> torch.Tensor:
    """float [rows, channels] -> float32 [chunks, channels]; one launch."""
    rows, channels = matrix.shape
    chunks = triton.cdiv(rows, ROWS_A_CHUNK)
    partial = torch.empty((chunks, channels), dtype=torch.float32, device=matrix.device)
    values, is_bf16 = raw(aligned(matrix))
    with device_of(matrix):
        partial_sums_kernel[(chunks, triton.cdiv(channels, CHANNELS))](
            values, partial, rows, channels,
            BF16=is_bf16, CHUNK=ROWS_A_CHUNK, ROWS=ROWS_AT_ONCE, CHANNELS=CHANNELS, num_warps=4,
        )  # fmt: skip
    return partial
