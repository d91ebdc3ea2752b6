"""What a check of the monitor costs: steps that are checked beside steps that are not, alternating in one process.

    python benchmarks/check_cost.py [--rounds 20] [--hidden 512] [--sequence 512] [--batch 4]

Two GPT layers under the plan "compress", fp32, dropout 0.1, one thread. A checked step has the monitor behind every
buffer that is held with loss, and ends with the judgement of what it saw.
"""

import argparse
import statistics
import sys
import time

import torch
from engine import GptLayer
from torch import nn

from megatron_adacc import enable_memory_optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.ModuleList(GptLayer(options.hidden, options.hidden // 64, options.sequence, 0.1) for _ in range(2))
    x = torch.randn(options.batch, options.sequence, options.hidden, requires_grad=True)
    never = {"plan": "compress", "warmup_steps": 0, "min_interval": 10**6, "max_interval": 10**6}
    with enable_memory_optim(layers, never) as handle:

        def step(checked: bool) -> float:
            start = time.perf_counter()
            if checked:
                handle.monitor.arm()
            y = x
            for layer in layers:
                y = layer(y)
            y.sum().backward()
            if checked:
                handle.monitor.judge()
                handle.monitor.disarm()
            handle.step()
            return time.perf_counter() - start

        for _ in range(3):
            step(False)
        step(True)
        pairs = [(step(False), step(True)) for _ in range(options.rounds)]
    plain, checked = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    sys.stdout.write(
        f"step {1e3 * plain:.1f} ms, checked step {1e3 * checked:.1f} ms: {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}), {options.rounds} pairs\n"
    )


if __name__ == "__main__":
    main()
