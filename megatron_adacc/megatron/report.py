"""What --adacc-report writes."""

import importlib.metadata
import json
import platform
import statistics
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Row:
    """The figures of one logged iteration: largest over the ranks and over the steps since the row before.

    lm_loss: of this iteration (None where the job's loss has another name).
    skipped_iterations: since the row before, steps whose update was left out, as after an overflow in fp16.
    step_ms: median wall-clock milliseconds of the steps since the row before, on the last rank.
    held_bytes: held for backward after one micro-batch's forward. peak_bytes: of the step, on the device
    (None where it could not be measured, see docs/accounting.md). peak_rss_bytes: of the process.
    """

    iteration: int
    lm_loss: float | None
    skipped_iterations: int
    step_ms: float
    held_bytes: int
    peak_bytes: int | None
    peak_rss_bytes: int


@dataclass
class Report:
    """A run's rows and what it was. ``plan``, ``gradient_errors``, ``frontiers``: as megatron/report_facts.py and
    adaptation give them, of the first data-parallel rank of each stage and tensor-parallel rank."""

    strategy: str
    device: str
    world_size: int
    run: dict[str, Any]
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    ranks: list[dict[str, int | None]] = field(default_factory=list)
    layer_held_bytes: dict[str, int] = field(default_factory=dict)
    predicted: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    plan: list[dict[str, Any]] = field(default_factory=list)
    gradient_errors: list[dict[str, Any]] = field(default_factory=list)
    frontiers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, args: Namespace) -> "Report":
        """The empty report of a run with these validated arguments."""
        import torch

        names = (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "seq_length",
            "micro_batch_size",
            "global_batch_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "data_parallel_size",
            "sequence_parallel",
            "hidden_dropout",
            "attention_dropout",
            "seed",
        )
        return cls(
            strategy=args.adacc_plan,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})",
            world_size=args.world_size,
            run={
                **{name: getattr(args, name, None) for name in names},
                "dtype": str(args.params_dtype).removeprefix("torch."),
            },
            versions={
                "python": platform.python_version(),
                **{name: importlib.metadata.version(name) for name in ("megatron-adacc", "megatron-core", "torch")},
            },
        )

    def summary(self) -> dict[str, Any]:
        """One line of a comparison. The first row pays for compilation and is left out of the median."""
        steps = [row.step_ms for row in self.rows[1:] or self.rows]
        losses = [row.lm_loss for row in self.rows if row.lm_loss is not None]
        return {
            "strategy": self.strategy,
            "iterations": self.rows[-1].iteration,
            "final_lm_loss": losses[-1] if losses else None,
            "step_ms_median": statistics.median(steps),
            "held_bytes": max(row.held_bytes for row in self.rows),
            "peak_bytes": max((row.peak_bytes for row in self.rows if row.peak_bytes is not None), default=None),
            "peak_rss_bytes": max(row.peak_rss_bytes for row in self.rows),
        }

    def json(self) -> str:
        """The report as JSON text."""
        return json.dumps(
            {
                "format": FORMAT,
                "summary": self.summary(),
                "device": self.device,
                "world_size": self.world_size,
                "run": self.run,
                "versions": self.versions,
                "layer_held_bytes": self.layer_held_bytes,
                "ranks": self.ranks,
                "predicted": self.predicted,
                "decisions": self.decisions,
                "plan": self.plan,
                "gradient_errors": self.gradient_errors,
                "frontiers": self.frontiers,
                "iterations": [asdict(row) for row in self.rows],
            },
            indent=1,
        )
