"""Time of every codec on the CPU, as ratios to a clone of the same tensor in the same run.

    python benchmarks/codecs/speed.py [--threads 2] [--megabytes 32] [--clock wall|processor] [CODEC ...]

For each codec: clone, encode and decode alternate, 15 times; medians. The limits are those of a 32 MB float32
tensor on 2 threads. The load of the machine is shown: where others work, threads wait for one another and
wall-clock ratios say little. `--threads 1 --clock processor` measures the work itself.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from megatron_adacc import codecs
from megatron_adacc.codecs import OutlierState

CHANNELS = 2048
REPEATS = 15
SETTLE_SECONDS = 5
ENCODE_LIMIT, DECODE_LIMIT, BITMASK_LIMIT = 1.6, 2.1, 1.6


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def seconds(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Time of one call, what it returns freed afterwards."""
    started = clock()
    result = call()
    stopped = clock()
    del result
    return stopped - started


def subject(name: str, megabytes: int) -> tuple[torch.Tensor, OutlierState | None]:
    """The tensor that a codec is timed on, and its state."""
    x = torch.randn((megabytes << 20) // 4 // CHANNELS, CHANNELS)
    state = None
    if name == "bitmask":
        x = (x < 1.28) / 0.9
    elif name.startswith("outlier"):
        state = OutlierState.from_channels(range(7, CHANNELS, 128), CHANNELS, "cpu")
    return x, state


def ratios(name: str, megabytes: int, clock: Callable[[], float]) -> tuple[float, float, float]:
    """(clone in milliseconds, encode / clone, decode / clone)."""
    x, state = subject(name, megabytes)
    codec = codecs.get(name)
    packed = codec.encode(x, state)
    calls = {"clone": x.clone, "encode": lambda: codec.encode(x, state), "decode": lambda: codec.decode(packed)}
    times: dict[str, list[float]] = {what: [] for what in calls}
    for repeat in range(REPEATS + 2):
        for what, call in calls.items():
            taken = seconds(call, clock)
            if repeat >= 2:
                times[what].append(taken)
    clone, encode, decode = (statistics.median(times[what]) for what in calls)
    return clone * 1e3, encode / clone, decode / clone


def main() -> int:
    """Print the table; 1 if a codec is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("codecs", nargs="*", default=codecs.names())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    sys.stdout.write(
        f"{args.megabytes} MiB float32, {args.threads} threads, torch {torch.__version__}, load before {load:.1f}\n"
    )
    sys.stdout.write(f"{'codec':<14}{'clone ms':>10}{'encode':>10}{'decode':>10}\n")
    for name in args.codecs:
        # All compilations first: the compiler's processes would run beside the first measurements.
        x, state = subject(name, 1)
        codecs.get(name).decode(codecs.get(name).encode(x, state))
    time.sleep(SETTLE_SECONDS)
    beyond = 0
    for name in args.codecs:
        clone, encode, decode = ratios(name, args.megabytes, CLOCKS[args.clock])
        limits = (BITMASK_LIMIT, BITMASK_LIMIT) if name == "bitmask" else (ENCODE_LIMIT, DECODE_LIMIT)
        slow = encode > limits[0] or decode > limits[1]
        beyond += slow
        sys.stdout.write(
            f"{name:<14}{clone:>10.1f}{encode:>8.2f} x{decode:>8.2f} x{'  beyond its limit' if slow else ''}\n"
        )
    sys.stdout.write(f"load after {os.getloadavg()[0]:.1f}\n")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
