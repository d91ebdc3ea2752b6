"""Run one model of Adacc's evaluation (arXiv 2508.00806) under each method. Called by reproduce_*.sh."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_adacc.child import Child
from megatron_adacc.cost.devices import device, device_names
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import reproduce_records as records
from megatron_adacc.megatron.reproduce_jobs import (
    ENVIRONMENT,
    EXPERIMENTS,
    METHODS,
    RANKS,
    Experiment,
    Method,
    command,
    job_flags,
)

ROOT = Path(__file__).resolve().parent.parent
SEARCH_ITERATIONS = 3
# What a record says of a run must be so.
FIXED = {
    *("--seq-length", "--micro-batch-size", "--global-batch-size", "--num-layers", "--hidden-size"),
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--train-iters"),
    *("--adacc-plan", "--adacc-error-budget", "--adacc-report"),
}


@dataclass(frozen=True)
class Order:
    """What the command line asks for."""

    experiment: Experiment
    methods: tuple[Method, ...]
    micro_batches: tuple[int, ...]
    iterations: int
    data: Path | None
    folder: Path
    extra: tuple[str, ...]


def parser_of(key: str) -> argparse.ArgumentParser:
    """The options; what follows -- is Megatron's."""
    one = EXPERIMENTS[key]
    layout = f"tensor {one.tensor}, pipeline {one.pipeline}, data {one.data}"
    sizes = ", ".join(map(str, one.micro_batches))
    parser = argparse.ArgumentParser(
        prog=f"scripts/reproduce_{key.replace('.', '_')}.sh",
        description=f"{one.title} of Adacc (arXiv 2508.00806) on {one.ranks} GPUs ({layout} parallel), fp16, local "
        f"layers, sequence {one.sequence}, under each method and micro-batch. `adacc reproduce` shows what came out.",
        epilog="What follows -- is handed to Megatron, behind all other flags.",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands and what the planner predicts; run nothing"
    )
    parser.add_argument(
        "--cpu-scale", action="store_true", help="the same commands with small sizes, on two ranks of the CPU"
    )
    parser.add_argument(
        "--largest", action="store_true", help="search for the largest micro-batch of each method instead"
    )
    parser.add_argument("--method", action="append", choices=list(METHODS), help="only this one; may be repeated")
    parser.add_argument(
        "--micro-batch",
        action="append",
        type=_whole,
        metavar="N",
        help=f"only this size; may be repeated (default: {sizes})",
    )
    parser.add_argument("--iterations", type=_whole, default=30, metavar="N", help="of each run (default: 30)")
    parser.add_argument("--sequence", type=_whole, metavar="N", help=f"sequence length (default: {one.sequence})")
    parser.add_argument("--ranks", type=_whole, metavar="N", help=f"GPUs of this machine to use (default: {RANKS})")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder of `adacc prepare-data --vocab-size 50257` (default: mock data)",
    )
    parser.add_argument(
        "--device",
        default="v100-32gb",
        metavar="NAME",
        help=f"for predictions: {', '.join(device_names())}; default v100-32gb",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "reproduce", metavar="DIR", help="default: runs/reproduce"
    )
    return parser


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_whole.__name__ = "whole number from 1 up"  # what argparse calls it


def order_of(key: str, args: argparse.Namespace, extra: Sequence[str]) -> Order:
    """Raises UserError for what does not go together."""
    experiment = EXPERIMENTS[key]
    if args.ranks is not None:
        split = experiment.tensor * experiment.pipeline
        if args.ranks % split:
            raise UserError(f"--ranks is {args.ranks}, but {experiment.title} is split over {split}: give a multiple.")
        experiment = replace(experiment, ranks=args.ranks)
    if args.sequence is not None:
        experiment = replace(experiment, sequence=args.sequence)
    fixed = [token.split("=")[0] for token in extra if token.split("=")[0] in FIXED]
    if fixed:
        raise UserError(
            f"{fixed[0]} is what the runs are sorted by: set it by an option of this script, or in configs/."
        )
    if args.cpu_scale:
        if args.largest or args.ranks is not None or args.sequence is not None:
            raise UserError(
                "--cpu-scale shows that the commands run, at a size of its own: leave out --largest, --ranks and "
                "--sequence."
            )
        experiment = experiment.for_cpu()
    if args.dry_run and args.largest:
        raise UserError(
            "--largest runs what it finds out by running: `adacc reproduce --predict` says what the planner predicts."
        )
    if args.data is not None and not (args.data / "tokenizer").is_dir():
        raise UserError(f"--data {args.data} is no folder of `adacc prepare-data`: it has no tokenizer.")
    methods = tuple(METHODS[name] for name in args.method or METHODS)
    sizes = tuple(args.micro_batch or experiment.micro_batches)
    folder = args.output.resolve() / (f"{key}-cpu" if experiment.small else key)
    data = None if args.data is None else args.data.resolve()
    return Order(experiment, methods, sizes, args.iterations, data, folder, tuple(extra))


def planned(order: Order, method: Method, micro_batch: int, search: bool = False) -> tuple[list[str], Path, Path]:
    """A run's command, and the paths of its record and its report."""
    name = records.name_of(method, micro_batch, search)
    report = order.folder / f"{name}.report.json"
    iterations = SEARCH_ITERATIONS if search else order.iterations
    flags = job_flags(order.experiment, method, micro_batch, iterations, report, order.data, order.extra)
    return command(order.experiment, ROOT / "pretrain_gpt.py", flags), order.folder / f"{name}.run.json", report


def dry_run(order: Order, device_name: str, console: Console) -> None:
    """Every command, then the predictions as a table."""
    prefix = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    for micro_batch in order.micro_batches:
        for method in order.methods:
            console.print(f"# {method.title}, micro-batch {micro_batch}", markup=False)
            line = shlex.join([*prefix, *planned(order, method, micro_batch)[0]])
            sys.stdout.write(line + "\n")
    if order.experiment.small:
        console.print("No prediction: the device table has no CPU.")
        return
    from megatron_adacc.megatron.reproduce_predict import Predictor
    from megatron_adacc.planner.quiet import solver_prints_to_stderr

    spec = device(device_name)
    predictor = Predictor(order.experiment, spec, order.extra)
    console.print(f"Predicted on {order.experiment.ranks} x {spec.full_name}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("micro-batch", "method", "samples/s", "step ms", "held GiB", "peak GiB", "fits"):
        table.add_column(name, justify="left" if name in ("method", "fits") else "right", no_wrap=True)
    for micro_batch in order.micro_batches:
        for method in order.methods:
            with solver_prints_to_stderr():
                found = predictor.run(method, micro_batch)
            table.add_row(
                str(micro_batch),
                method.title,
                f"{found['samples_per_second']:.1f}",
                f"{found['step_ms']:.1f}",
                f"{found['held_bytes'] / 2**30:.2f}",
                f"{found['peak_bytes'] / 2**30:.2f}",
                "yes" if found["fits"] else "no",
            )
    console.print(table)


def run(order: Order, method: Method, micro_batch: int, console: Console, search: bool = False) -> bool:
    """Run it, unless it was run before; whether it got its memory. Exits with the job's code if it fails otherwise."""
    tokens, path, report = planned(order, method, micro_batch, search)
    words = f"{order.experiment.title}, {method.title}, micro-batch {micro_batch}"
    before = records.done_before(path, tokens)
    if before is not None:
        console.print(f"{words}: {before}, as recorded in {path.name}", markup=False, soft_wrap=True)
        return before == records.FINISHED
    report.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    log = path.with_name(path.name.replace(".run.json", ".log"))
    with console.status(f"{words} ..."), Child(tokens, {**ENVIRONMENT, "HF_HUB_OFFLINE": "1"}, log) as job:
        for _ in job.lines():
            pass
    outcome = records.outcome_of(job.code, log.read_text())
    if outcome is None:
        console.print("".join(list(job.tail)[-20:]), markup=False, highlight=False)
        console.print(f"{words}: failed with exit code {job.code}; its log is {log}.", markup=False, soft_wrap=True)
        sys.exit(job.code if job.code > 0 else 1)
    records.save(path, order.experiment, method, micro_batch, search, order.extra, outcome, tokens, report)
    console.print(f"{words}: {outcome}", markup=False, soft_wrap=True)
    return outcome == records.FINISHED


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number from 1 up that fits, where all up to it do; 0 where 1 does not. Doubles from the guess, then
    halves the interval."""
    low, high = 0, None
    while high is None or high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        guess = 2 * low if high is None else (low + high) // 2
    return low


def need_gpus(number: int) -> None:
    """Raises UserError where this machine has fewer."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < number:
        raise UserError(
            f"This machine has {there} GPUs that torch sees, and the run needs {number}: give --ranks, or look with "
            "--dry-run, or try the commands with --cpu-scale."
        )


def main(argv: Sequence[str]) -> int:
    """The model's key, then options, then -- and Megatron's flags."""
    key, rest = argv[0], list(argv[1:])
    cut = rest.index("--") if "--" in rest else len(rest)
    parser = parser_of(key)
    args = parser.parse_args(rest[:cut])
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
    try:
        order = order_of(key, args, rest[cut + 1 :])
        if args.dry_run:
            dry_run(order, args.device, console)
            return 0
        if not order.experiment.small:
            need_gpus(order.experiment.ranks)
        order.folder.mkdir(parents=True, exist_ok=True)
        for method in order.methods:
            if args.largest:
                largest(lambda n, method=method: run(order, method, n, console, True), order.micro_batches[-1])  # type: ignore[misc]
                continue
            for micro_batch in order.micro_batches:
                run(order, method, micro_batch, console)
        console.print(f"adacc reproduce {shlex.quote(str(order.folder.parent))} shows the tables.", soft_wrap=True)
    except UserError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{parser.prog}: interrupted; what finished is kept\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
