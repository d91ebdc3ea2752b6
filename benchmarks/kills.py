"""Kill a training again and again, in the middle of steps, and see whether it ends like one that was never killed.

    python benchmarks/kills.py [--kills 20] [--seed 1] [--plan auto] [--plan compress]

Each process is killed (SIGKILL) at a random pack of a random one of its first three steps and started again from its
last checkpoint, which is written after every step. In the end every tensor of the last checkpoint (weights, moments,
random states) is compared with that of a run without faults.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from checkpoints import checkpoint

SCRIPT = ROOT / "tests" / "megatron" / "failing_script.py"
PACKS = 2 * 2 * 29  # of a step: micro-batches, layers, saves of a layer
SETTINGS = {
    "num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 16, "max-position-embeddings": 16,
    "micro-batch-size": 2, "global-batch-size": 4, "lr": 1e-2, "lr-decay-style": "constant", "seed": 1234,
    "tokenizer-type": "NullTokenizer", "vocab-size": 127, "eval-iters": 0, "eval-interval": 1000, "log-interval": 1,
    "num-workers": 0, "hidden-dropout": 0.1, "attention-dropout": 0.1, "ckpt-format": "torch", "save-interval": 1,
}  # fmt: skip
FLAGS = ["--mock-data", *(token for name, value in SETTINGS.items() for token in (f"--{name}", str(value)))]
PLANS = {
    "auto": ["--adacc-plan", "auto", "--adacc-limit", "80%"],
    "compress": ["--adacc-plan", "compress", "--adacc-warmup-steps", "2", "--adacc-max-interval", "4"],
}


def train(plan: str, folder: Path, iterations: int, **faults: int) -> tuple[int, str]:
    """The exit code of a job that goes on from its last checkpoint, if there is one, and the end of what it said."""
    command = [sys.executable, str(SCRIPT), *FLAGS, "--train-iters", str(iterations), *PLANS[plan]]
    command += ["--save", str(folder), "--load", str(folder)]
    environment = {**os.environ, **{name: str(value) for name, value in faults.items()}}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return ended.returncode, ended.stdout[-3000:]


def done(folder: Path) -> int:
    path = folder / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def run(plan: str, kills: int, seed: int, console: Console) -> str:
    draw = random.Random(seed)
    iterations = 2 * kills + 4
    with tempfile.TemporaryDirectory() as scratch:
        whole, killed = Path(scratch, "whole"), Path(scratch, "killed")
        code, said = train(plan, whole, iterations)
        if code:
            raise SystemExit(f"{said}\nthe run without faults failed under {plan}")
        points = []
        for _ in track(range(kills), description=f"{plan}: kills", console=console):
            step, pack = draw.randint(1, 3), draw.randint(0, PACKS - 1)
            code, said = train(plan, killed, iterations, KILL_AT=step, KILL_PACK=pack)
            points.append(done(killed) + 1)
            if code != -9:
                raise SystemExit(f"{said}\na run that was to be killed ended with {code} under {plan}")
        code, said = train(plan, killed, iterations)
        if code:
            raise SystemExit(f"{said}\nthe run that was killed {kills} times did not end well under {plan}")
        expected, found = checkpoint(whole, iterations), checkpoint(killed, iterations)
        different = [path for path, tensor in expected.items() if not torch.equal(tensor, found[path])]
    return f"| {plan} | {kills} | {iterations} | {' '.join(map(str, points))} | {len(expected)} | {len(different)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plan", action="append", choices=list(PLANS))
    options = parser.parse_args()
    console = Console(stderr=True)
    rows = [run(plan, options.kills, options.seed, console) for plan in options.plan or PLANS]
    header = (
        "| plan | kills | iterations | killed in iteration | tensors compared | different |\n|---|---|---|---|---|---|"
    )
    sys.stdout.write("\n".join([header, *rows]) + "\n")


if __name__ == "__main__":
    main()
