"""Start a Megatron script with our flags: choose the device, bridge the CPU, apply the patches.

`prepare()` runs before the script imports Megatron, because Megatron imports names of `torch.cuda` by
value. `user_errors()` surrounds what runs afterwards.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from megatron_adacc import devices
from megatron_adacc.errors import UserError
from megatron_adacc.machine import find_compiler
from megatron_adacc.megatron.console import rank, say

# How long another rank leaves the word to rank 0.
_SECONDS_FOR_RANK_0 = 4.0

# Whether this process was prepared: patches and bridge belong to the process, not to an object.
_prepared = False


@contextlib.contextmanager
def user_errors(program: str) -> Iterator[None]:
    """Turn a user's mistake into one sentence and exit code 2, and Ctrl-C into exit code 130."""
    try:
        yield
    except UserError as error:
        _leave(program, f"error: {error}", 2)
    except KeyboardInterrupt:
        _leave(program, "interrupted", 130)


def _job_runs() -> bool:
    """Whether the ranks have met, without importing what may be half imported."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    return distributed is not None and getattr(distributed, "is_initialized", bool)()


def _leave(program: str, message: str, code: int) -> None:
    """Say it, once a job where all ranks find the same mistake, and end this process with `code`."""
    if rank() != 0 and code == 130:
        message = ""  # rank 0 was interrupted too
    elif rank() != 0 and not _job_runs():
        # Most mistakes are every rank's: then rank 0 says it, and its end ends this rank before it repeats it.
        # Leaving first would end rank 0 before it could speak.
        time.sleep(_SECONDS_FOR_RANK_0)
    if message:
        sys.stderr.write(f"{program}: {message}\n")
        sys.stderr.flush()
    sys.stdout.flush()
    # A peer may wait for this rank in a collective; the launcher ends it when this process is gone, which
    # an orderly shutdown of the process group (a collective itself) would prevent.
    os._exit(code)


def _excepthook(program: str) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """Ctrl-C while the script imports Megatron, outside of `user_errors`, is no traceback either."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _leave(program, "interrupted", 130)
        usual(kind, error, trace)

    return hook


def _requested_device(arguments: Sequence[str]) -> str | None:
    """--adacc-device, read ahead of Megatron's parser, which cannot be imported yet."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--adacc-device")
    try:
        return parser.parse_known_args(list(arguments))[0].adacc_device
    except argparse.ArgumentError as error:
        raise UserError(f"--adacc-device needs a value: {', '.join(devices.DEVICES)} ({error}).") from None


def _single_process() -> None:
    """Without a launcher, be the only rank of a job of one (python pretrain_gpt.py ...)."""
    if "RANK" in os.environ:
        return
    # Port 0: the store takes one that is free when it opens it, and a job of one has nobody to tell.
    port = os.environ.get("MASTER_PORT", "0")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", int(port)))
        except (ValueError, OverflowError):
            raise UserError(f"MASTER_PORT is {port!r}, which is not a port number.") from None
        except OSError:
            raise UserError(f"MASTER_PORT {port} is in use: choose another, or leave it unset.") from None
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT=port)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")


class _OneGenerator(logging.Filter):
    """Drops Megatron's warning that the host's generator moved while the device's was forked.

    On the CPU the two are one generator (devices/cpu.py), so it moves whenever dropout draws.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def quiet_missing_libraries() -> None:
    """Megatron warns a dozen times at import that apex and Transformer Engine are missing; `adacc doctor` says it."""
    for message in (".*Apex.*not installed.*", "Apex is not installed.*", ".*transformer-engine.*"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _say_cpu(changed: list[str]) -> None:
    cuts = f"; for that Megatron runs with {' '.join(changed)}" if changed else ""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        cuts += (
            "; its fused functions run unfused, since torch.compile finds no working C++ compiler (see `adacc doctor`)"
        )
    say(f"training on the CPU (gloo){cuts}")


def prepare(program: str, arguments: Sequence[str] | None = None) -> None:
    """Make this process ready to import Megatron and run a training script.

    A user's mistake ends the process with a sentence. A second call does nothing: `adacc run` may be given a
    script that prepares itself, ours among them.
    """
    global _prepared
    with user_errors(program):
        if not _prepared:
            sys.excepthook = _excepthook(program)
            _prepare(list(sys.argv[1:] if arguments is None else arguments))
            _prepared = True


def _prepare(arguments: list[str]) -> None:
    # torchrun stops its ranks with SIGTERM; the default action ends them at once, without a traceback.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    device = devices.choose(_requested_device(arguments))
    _single_process()
    quiet_missing_libraries()
    if device == "cpu":
        if not find_compiler().works:
            os.environ["TORCH_COMPILE_DISABLE"] = "1"
        from megatron_adacc.devices import cpu

        cpu.install()
        logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_OneGenerator())
    _apply_patches(device, arguments)


def _apply_patches(device: str, arguments: list[str]) -> None:
    from megatron_adacc.megatron import checks, cpu_flags, flags, lora, state_flags, strategies
    from megatron_adacc.patches import (
        core_datasets_utils,
        core_optimizer_distrib_optimizer,
        core_transformer_spec_utils,
        core_transformer_torch_norm,
        patching,
        training_argument_utils,
        training_arguments,
        training_checkpointing,
        training_initialize,
        training_training,
    )

    def adjust(args: Namespace) -> None:
        flags.complete(args, arguments)
        if device == "cpu":
            switched_off.update(dict.fromkeys(cpu_flags.adjust(args)))

    # Megatron parses its command line several times a run, and validates it once.
    switched_off: dict[str, None] = {}

    def check(args: Namespace) -> None:
        if device == "cpu":
            _say_cpu(list(switched_off))
        checks.check_arguments(args)
        lora.install(args)
        exchange = loss = None
        if (changed := state_flags.apply_preset(args)) is not None:
            say(changed)
        if state_flags.own_optimizer(args):
            from megatron_adacc.megatron.state_plan import Exchange
            from megatron_adacc.megatron.step_loss import StepLoss
            from megatron_adacc.patches import core_optimizer

            loss = StepLoss() if args.adacc_gradient_guard is not None else None
            exchange = Exchange(args, loss)
            patching.apply([*core_optimizer.patches(exchange), *core_optimizer_distrib_optimizer.state_patches()])
        around_step = training_training.Step.as_it_is
        if args.adacc_plan != "off" or args.adacc_report is not None:
            from megatron_adacc.megatron.observe import Observer
            from megatron_adacc.megatron.saved_state import SavedState

            saved = SavedState(exchange)
            around_step = Observer(args, saved).around_step
            patching.apply(training_checkpointing.patches(saved.entry, saved.loaded))
        if loss is not None:
            around_step = loss.around(around_step)
        if around_step is not training_training.Step.as_it_is:
            patching.apply(training_training.patches(around_step))
        if strategies.get(args.adacc_plan).plan is not None:
            from megatron_adacc.megatron.layer import marked

            patching.apply(core_transformer_spec_utils.patches(marked))

    patching.apply(
        [
            *training_arguments.patches(flags.add_flags, adjust),
            *training_argument_utils.patches(check),
            *core_datasets_utils.patches(),
            *core_optimizer_distrib_optimizer.patches(),
            *core_transformer_torch_norm.patches(),
            *(training_initialize.patches() if device == "cpu" else ()),
        ]
    )
