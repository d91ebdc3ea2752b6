"""The runs of the evaluation of Adacc (arXiv 2508.00806): models, their layout on 8 GPUs, and what is compared.

    flags = job_flags(EXPERIMENTS["117m"], METHODS["baseline"], micro_batch=8, iterations=20, report=path)
    command(EXPERIMENTS["117m"], script, flags)        # torchrun --nproc-per-node 8 pretrain_gpt.py ...

The paper names models, GPUs and methods; sequence lengths and layouts are ours where it does not say them
(docs/reproduction.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

ERROR_BUDGET = 0.02
RANKS = 8
# Megatron's default, 2^32, would let an fp16 run skip a score of steps before the first update.
_LOSS_SCALE = 65536


@dataclass(frozen=True)
class Method:
    """One of the things compared. ``title``: the paper's name, with ours where there are two; ``flags``: of the job;
    ``strategy``: its name in megatron/planning.py."""

    key: str
    title: str
    flags: tuple[str, ...]
    strategy: str


# Lossy plans begin at once here: runs are short, and memory is that of the plan.
_AT_ONCE = ("--adacc-warmup-steps", "0")
METHODS = {
    method.key: method
    for method in (
        Method("baseline", "Baseline", ("--adacc-plan", "off"), "none"),
        Method("full", "Full Recomp", ("--adacc-plan", "full"), "full"),
        Method("quantization", "Quantization", ("--adacc-plan", "quantize", *_AT_ONCE), "quantized"),
        Method("adacc", "Adacc, lossless", ("--adacc-plan", "auto"), "auto"),
        Method(
            "adacc-lossy",
            f"Adacc, error {ERROR_BUDGET:g}",
            ("--adacc-plan", "auto", "--adacc-error-budget", f"{ERROR_BUDGET:g}", *_AT_ONCE),
            "auto lossy",
        ),
    )
}


@dataclass(frozen=True)
class Experiment:
    """A model on ``ranks`` GPUs. ``accumulated``: micro-batches of a step on each pipeline; ``micro_batches``: the
    sizes that are run; ``small``: sizes cut down for two ranks of a CPU."""

    key: str
    title: str
    config: str
    sequence: int
    micro_batches: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    accumulated: int = 1
    ranks: int = RANKS
    small: bool = False

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.ranks // (self.tensor * self.pipeline)

    def for_cpu(self) -> Experiment:
        """The same with two ranks for the first kind of parallelism that is used, and small sizes."""
        tensor, pipeline = min(self.tensor, 2), 1 if self.tensor > 1 else min(self.pipeline, 2)
        return replace(
            self, sequence=32, micro_batches=(2, 4), tensor=tensor, pipeline=pipeline, ranks=2, small=True,
            accumulated=min(self.accumulated, 2),
        )  # fmt: skip


EXPERIMENTS = {
    one.key: one
    for one in (
        Experiment("117m", "GPT-117M", "gpt_117m.yaml", 512, (8, 16, 32, 48, 64, 96, 128)),
        Experiment("345m", "GPT-345M", "gpt_345m.yaml", 1024, (2, 4, 8, 12, 16, 24, 32)),
        Experiment("4.7b", "GPT-4.7B", "gpt_4_7b.yaml", 1024, (4, 8, 16, 24, 32, 48, 64), tensor=8),
    )
}

_SMALL = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "vocab-size": 127}


def settings_of(experiment: Experiment, micro_batch: int) -> dict[str, Any]:
    """Megatron's flags by name: model, layout and batch."""
    text = resources.files("megatron_adacc.configs").joinpath(experiment.config).read_text()
    settings: dict[str, Any] = yaml.safe_load(text)
    settings |= _SMALL if experiment.small else {}
    settings |= {
        "seq-length": experiment.sequence,
        "max-position-embeddings": experiment.sequence,
        "micro-batch-size": micro_batch,
        "global-batch-size": micro_batch * experiment.data * experiment.accumulated,
        "tensor-model-parallel-size": experiment.tensor,
        "pipeline-model-parallel-size": experiment.pipeline,
    }
    if experiment.tensor > 1:
        settings["sequence-parallel"] = True
    return settings


def flags_of(settings: dict[str, Any]) -> list[str]:
    """{"name": value} as --name value; True is a flag without a value, False and None leave it out."""
    tokens: list[str] = []
    for name, value in settings.items():
        if value is not None and value is not False:
            tokens += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tokens


def job_flags(
    experiment: Experiment,
    method: Method,
    micro_batch: int,
    iterations: int,
    report: Path,
    data: Path | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """What follows pretrain_gpt.py. ``data``: a folder of `adacc prepare-data`, mock data without; ``extra``: further
    flags of Megatron's, which come last and so decide."""
    settings = settings_of(experiment, micro_batch)
    settings |= {
        "initial-loss-scale": _LOSS_SCALE,
        "train-iters": iterations,
        "lr-decay-iters": max(iterations, 10),
        "log-interval": 1,
        "eval-interval": 1000000,
        "eval-iters": 0,
        "seed": 1234,
    }
    if data is None:
        settings |= {"mock-data": True, "tokenizer-type": "NullTokenizer"}
    else:
        settings |= {
            "vocab-size": None,
            "tokenizer-type": "HuggingFaceTokenizer",
            "tokenizer-model": data / "tokenizer",
            "data-path": data / "text_document",
            "split": "100,0,0",
        }
    if experiment.small:
        settings |= {"num-workers": 0, "adacc-device": "cpu"}
    return [*flags_of(settings), *method.flags, "--adacc-report", str(report), *extra]


def planned_flags(experiment: Experiment, micro_batch: int, extra: Sequence[str] = ()) -> list[str]:
    """The flags that the planner looks at: those of :func:`job_flags` without data, iterations and method."""
    return [*flags_of(settings_of(experiment, micro_batch)), *extra]


def command(experiment: Experiment, script: Path, flags: Sequence[str]) -> list[str]:
    """The whole command line, torchrun of this Python's environment first."""
    torchrun = Path(sys.executable).parent / "torchrun"
    return [str(torchrun), "--standalone", "--nproc-per-node", str(experiment.ranks), str(script), *flags]


# Megatron wants one hardware queue where tensor parallelism overlaps communication, on GPUs before Blackwell.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
