"""`adacc reproduce`: the paper's tables from the runs of scripts/reproduce_*.sh, beside what the planner predicts.

adacc reproduce                         what was run, from runs/reproduce
adacc reproduce --predict --markdown    with predictions for 8 x V100, which need no GPU and no run
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_adacc.cost.devices import DeviceSpec, device, device_names
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import reproduce_records as records
from megatron_adacc.megatron.plan_table import console, waiting
from megatron_adacc.megatron.reproduce_jobs import EXPERIMENTS, METHODS, Experiment
from megatron_adacc.megatron.reproduce_tables import Prediction, Table, tables
from megatron_adacc.outputs import check_folders, write

FORMAT = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = "The tables of Adacc (arXiv 2508.00806): the paper's figures, predicted and measured ones."
    parser.add_argument("folder", metavar="DIR", nargs="?", default="runs/reproduce", help="default: runs/reproduce")
    parser.add_argument("--model", action="append", choices=list(EXPERIMENTS), help="only this one; may be repeated")
    parser.add_argument("--predict", action="store_true", help="predict every run, too; takes minutes, needs no GPU")
    parser.add_argument(
        "--device", metavar="NAME", default="v100-32gb", help=f"for --predict: {', '.join(device_names())}"
    )
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--json", metavar="FILE", help="write records and predictions as JSON; - prints them instead")


def run(args: argparse.Namespace) -> int:
    """Read, predict, print. Raises UserError where there is neither a run nor --predict."""
    check_folders(or_printed=args.json)
    spec = device(args.device)
    found = records.load(Path(args.folder))
    models = args.model or [key for key in EXPERIMENTS if args.predict or any(one.model == key for one in found)]
    found = [one for one in found if one.model in models]
    if not found and not args.predict:
        raise UserError(
            f"{args.folder} has no record of a run: run scripts/reproduce_*.sh first, or give --predict for what the "
            "planner predicts."
        )
    content: list[dict[str, Any]] = []
    shown: list[Table] = []
    for key in models:
        groups = grouped([one for one in found if one.model == key])
        for experiment, group in groups or [(EXPERIMENTS[key], [])]:
            prediction = predict(experiment, spec, group) if args.predict and not experiment.small else None
            shown += tables(experiment, prediction, group)
            content.append(_data(experiment, prediction, group))
    text = json.dumps({"format": FORMAT, "experiments": content}, indent=1) + "\n"
    if args.json == "-":
        sys.stdout.write(text)
        return 0
    if args.json:
        write(args.json, text)
    if args.markdown:
        sys.stdout.write("\n".join(table.markdown() for table in shown))
    else:
        _print(shown)
    return 0


def grouped(found: Sequence[records.Record]) -> list[tuple[Experiment, list[records.Record]]]:
    """A model's records by what must not be mixed: size, sequence, ranks, further flags, device. A run that did not get
    its memory tells no device, and goes with the others of its kind; with each of them where there are several."""
    groups: dict[tuple[bool, int, int, tuple[str, ...]], list[records.Record]] = {}
    for one in found:
        groups.setdefault((one.small, one.sequence, one.ranks, one.extra), []).append(one)
    result = []
    for (small, sequence, ranks, _), group in groups.items():
        experiment = EXPERIMENTS[group[0].model]
        experiment = experiment.for_cpu() if small else experiment
        experiment = replace(experiment, sequence=sequence, ranks=ranks)
        devices = dict.fromkeys(one.device for one in group if one.device is not None)
        names: list[str | None] = [*devices] or [None]
        result += [(experiment, [one for one in group if one.device in (name, None)]) for name in names]
    return result


def predict(experiment: Experiment, spec: DeviceSpec, found: Sequence[records.Record]) -> Prediction:
    """Every run of the experiment and every other that is recorded, and the largest micro-batches."""
    from megatron_adacc.megatron.reproduce_predict import Predictor
    from megatron_adacc.planner.quiet import solver_prints_to_stderr

    predictor = Predictor(experiment, spec, found[0].extra if found else ())
    sizes = sorted({*experiment.micro_batches, *(one.micro_batch for one in found if not one.search)})
    with waiting(f"{experiment.title}: tracing and solving"), solver_prints_to_stderr():
        return {
            "device": spec.full_name,
            "runs": {(key, size): predictor.run(METHODS[key], size) for size in sizes for key in METHODS},
            "largest": {key: predictor.largest(method) for key, method in METHODS.items()},
        }


def _data(experiment: Experiment, prediction: Prediction | None, group: Sequence[records.Record]) -> dict[str, Any]:
    predicted = None
    if prediction is not None:
        runs = [{"method": key, "micro_batch": size, **one} for (key, size), one in prediction["runs"].items()]
        predicted = {"device": prediction["device"], "runs": runs, "largest": prediction["largest"]}
    return {
        "model": experiment.key,
        "sequence": experiment.sequence,
        "ranks": experiment.ranks,
        "small": experiment.small,
        "extra": list(group[0].extra) if group else [],
        "predicted": predicted,
        "measured": [dataclasses.asdict(one) for one in group],
    }


def _print(shown: Sequence[Table]) -> None:
    from rich import box
    from rich.table import Table as Drawn

    out = console()
    for table in shown:
        out.print(table.title)
        drawn = Drawn(box=box.SIMPLE_HEAD)
        for index, name in enumerate(table.columns):
            drawn.add_column(name, justify="right" if index else "left")
        for row in table.rows:
            drawn.add_row(*row)
        out.print(drawn)
        if table.note:
            out.print(table.note)
