"""`adacc run`: an unmodified Megatron script with the --adacc-* flags added to its own.

    adacc run [torchrun options] SCRIPT [the script's flags] [--adacc-plan PLAN ...]

Started by hand, it launches SCRIPT under torchrun (one process unless --nproc-per-node says more).
Started by torchrun, as `torchrun --nproc-per-node 8 -m megatron_adacc.megatron.worker SCRIPT ...`, the
worker alone does the same in each rank.
"""

import argparse
import logging
import os
import sys
from argparse import Namespace
from typing import NoReturn

from megatron_adacc.errors import UserError

_OWN_RENDEZVOUS = ("master_addr", "rdzv_endpoint", "rdzv_id")


def configure(parser: argparse.ArgumentParser) -> None:
    """Everything is handed on: torchrun's options to torchrun, the rest to the script."""
    parser.usage = "adacc run [torchrun options] SCRIPT [the script's flags] [--adacc-plan PLAN ...]"
    parser.description = "Run an unmodified Megatron-LM script under torchrun, with the --adacc-* flags added."
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="torchrun options (--nproc-per-node N, --nnodes, --master-port, ...), then the script and its flags",
    )


def run(args: Namespace) -> int:
    """Launch the script; returns the exit code of the job."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import run as launch

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    job = parser.parse_args(args.arguments)
    if job.module or job.no_python:
        raise UserError("adacc run takes a script file; --module and --no-python are torchrun's alone.")
    if not os.path.isfile(job.training_script):
        raise UserError(f"There is no script {job.training_script}: give the path of a Megatron script.")
    if int(str(job.nnodes).split(":")[-1]) == 1 and not any(_given(args.arguments, name) for name in _OWN_RENDEZVOUS):
        if _given(args.arguments, "master_port"):
            _check_port(job.master_port)
        else:
            # A free port of its own: two jobs on one machine do not meet.
            job.standalone = True
    job.module = True
    job.training_script_args = [os.path.abspath(job.training_script), *job.training_script_args]
    job.training_script = "megatron_adacc.megatron.worker"
    # The rank's own sentence, and ours below, say what torchrun's log would repeat.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch(job)
    except SignalException as stopped:
        sys.stderr.write(f"adacc run: stopped by {stopped.sigval.name}\n")
        return 128 + stopped.sigval.value
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"adacc run: rank {rank} ended with exit code {failure.exitcode}; the job was stopped.\n")
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def _refuse(message: str) -> NoReturn:
    raise UserError(
        f"{message}; the call is adacc run [torchrun options] SCRIPT [flags], with the script's flags and ours behind "
        "SCRIPT."
    )


def _given(arguments: list[str], option: str) -> bool:
    """Whether torchrun's option (an attribute name) stands on the command line, in either spelling."""
    spellings = (f"--{option}", f"--{option.replace('_', '-')}")
    return any(token.split("=")[0] in spellings for token in arguments)


def _check_port(port: int) -> None:
    import socket

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            raise UserError(f"--master-port {port} is in use: choose another, or leave it out.") from None
