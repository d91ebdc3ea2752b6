"""The `adacc` command: one module a sub-command, imported only when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from megatron_adacc import __version__
from megatron_adacc.errors import UserError

# Heading of `adacc --help` -> name -> (module, one line of help), in the order of the work. A command module has
# configure(parser) and run(args) -> exit code.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "this machine and your data": {
        "doctor": ("megatron_adacc.doctor", "say what this machine has, what will be used and what is wrong"),
        "kernels": ("megatron_adacc.kernels.tool", "compile the Triton kernels offline, or time them on a GPU"),
        "prepare-data": (
            "megatron_adacc.megatron.prepare_data",
            "train a tokenizer and write a Megatron data set from text files",
        ),
    },
    "look at a model and plan; needs no GPU": {
        "trace": ("megatron_adacc.megatron.trace_command", "show what one layer keeps for its backward pass"),
        "memory": (
            "megatron_adacc.megatron.memory_command",
            "say what parameters, gradients and optimizer state need on each rank",
        ),
        "plan": ("megatron_adacc.megatron.plan_command", "plan for a GPU that is not there, beside what others do"),
        "explain": (
            "megatron_adacc.megatron.explain_command",
            "say why each tensor of a plan file got its action, or how a run's plan changed",
        ),
        "max-batch": ("megatron_adacc.megatron.max_batch_command", "the largest micro-batch that fits, by strategy"),
        "frontier": (
            "megatron_adacc.megatron.frontier_command",
            "what a memory limit costs in time, as table and picture",
        ),
        "solve": ("megatron_adacc.planner.solve_command", "solve a problem given as JSON: the planner alone"),
    },
    "run": {
        "run": ("megatron_adacc.megatron.run", "run an unmodified Megatron script with the --adacc-* flags added"),
    },
    "after a run": {
        "report": ("megatron_adacc.megatron.report_command", "draw a run's report as one HTML page"),
        "evaluate": ("megatron_adacc.megatron.evaluate_command", "accuracy of a checkpoint on a cloze task"),
        "adapters": (
            "megatron_adacc.megatron.adapters_command",
            "export LoRA adapters for PEFT, or merge them into their base",
        ),
    },
    "compare strategies": {
        "bench": ("megatron_adacc.megatron.bench_command", "compare strategies side by side on this machine"),
        "compare-training": (
            "megatron_adacc.megatron.compare_command",
            "train with each strategy from the same seeds, and compare the losses",
        ),
        "reproduce": (
            "megatron_adacc.megatron.reproduce_command",
            "the paper's tables from the runs of scripts/reproduce_*.sh, beside predictions",
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}

# Commands whose arguments are somebody else's flags: all that follows the name is handed on unread.
HANDS_ON = {"bench", "compare-training", "evaluate", "frontier", "max-batch", "memory", "plan", "run", "trace"}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser with all command names; only `command`'s own arguments are filled in."""
    parser = argparse.ArgumentParser(
        prog="adacc",
        description="Activation memory for Megatron-LM: look, plan, run, compare.",
        epilog=_listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-adacc {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help="one of those below; adacc COMMAND --help says more"
    )
    for name, (module, _) in COMMANDS.items():
        subparser = subparsers.add_parser(name)
        if name == command:
            importlib.import_module(module).configure(subparser)
    return parser


def _listing() -> str:
    """The commands with their lines of help, under the headings."""
    width = 2 + max(map(len, COMMANDS))
    lines: list[str] = []
    for heading, group in GROUPS.items():
        lines += [*([""] if lines else []), f"{heading}:"]
        lines += [f"  {name:<{width}}{help_line}" for name, (_, help_line) in group.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; a `UserError` becomes one sentence on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((argument for argument in arguments if argument in COMMANDS), None)
    if arguments and arguments[0] in HANDS_ON and arguments[1:2] not in ([], ["-h"], ["--help"]):
        args = argparse.Namespace(command=arguments[0], arguments=arguments[1:])
    else:
        args = build_parser(command).parse_args(arguments)
    try:
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except UserError as error:
        sys.stderr.write(f"adacc {args.command}: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"adacc {args.command}: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
