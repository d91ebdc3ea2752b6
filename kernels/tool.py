"""`adacc kernels check` compiles every Triton kernel for GPUs that need not be here; `bench` times them on one."""

import argparse
import importlib.util
import os
import re
import sys

from megatron_adacc.errors import UserError
from megatron_adacc.kernels import load

TARGETS = ("sm_70", "sm_75", "sm_80", "sm_90", "sm_100")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `adacc kernels`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compile every kernel for each target; needs no GPU")
    check.add_argument(
        "--targets",
        default=",".join(TARGETS),
        metavar="sm_NN,...",
        help="GPU architectures to compile for (default: %(default)s)",
    )
    bench = actions.add_parser("bench", help="time every kernel on this machine's GPU")
    bench.add_argument(
        "--megabytes", type=int, default=256, metavar="N", help="size of the tensors (default: %(default)s)"
    )
    bench.add_argument(
        "--dtypes",
        default="float16,bfloat16",
        metavar="DTYPE,...",
        help="of float16, bfloat16, float32 (default: %(default)s)",
    )
    bench.add_argument("--codecs", default=None, metavar="NAME,...", help="codecs to time (default: all)")


def run(args: argparse.Namespace) -> int:
    """Do it; 1 if a kernel spills registers or differs from its reference."""
    return check(parse_targets(args.targets)) if args.action == "check" else bench(args)


def parse_targets(text: str) -> tuple[int, ...]:
    """Numbers of targets, 70 for sm_70.

    Raises:
        UserError: something that is not sm_NN, or older than Triton compiles for.
    """
    numbers = []
    for name in text.split(","):
        found = re.fullmatch(r"sm_(\d{2,3})", name.strip())
        if found is None or int(found[1]) < 70:
            raise UserError(f"Target {name.strip()!r} is not known; name GPU architectures from sm_70 on, as in sm_80.")
        numbers.append(int(found[1]))
    return tuple(numbers)


def check(targets: tuple[int, ...]) -> int:
    """Compile all variants for all targets and show registers, shared memory and spills."""
    _need_triton()
    catalog, offline = load("catalog", interpret=False), load("offline", interpret=False)
    variants = catalog.variants()
    write = sys.stdout.write
    write("registers a thread / shared memory in bytes a program / spilled bytes a thread\n")
    write(f"{'kernel':<38}" + "".join(f"{f'sm_{target}':>16}" for target in targets) + "\n")
    spilling = 0
    for variant in variants:
        cells = []
        for target in targets:
            usage = offline.compile_for(variant, target)
            spilling += usage.spill_bytes > 0
            cells.append(f"{usage.registers} / {usage.shared_bytes} / {usage.spill_bytes}")
        write(f"{variant.name:<38}" + "".join(f"{cell:>16}" for cell in cells) + "\n")
        sys.stdout.flush()
    write(f"{len(variants)} kernels compiled for {len(targets)} targets, {spilling} with spilled registers\n")
    return 1 if spilling else 0


def bench(args: argparse.Namespace) -> int:
    """Time the chosen codecs on the current GPU, beside a copy."""
    import torch

    from megatron_adacc import codecs

    if not torch.cuda.is_available():
        raise UserError(
            "adacc kernels bench needs a CUDA GPU, and torch sees none here; 'adacc kernels check' compiles the "
            "kernels without one."
        )
    _need_triton()
    measure = load("measure", interpret=False)
    names = tuple(args.codecs.split(",")) if args.codecs else codecs.names()
    dtypes = tuple(args.dtypes.split(","))
    for wrong in [name for name in names if name not in codecs.names()]:
        raise UserError(f"There is no codec '{wrong}'; there are {', '.join(codecs.names())}.")
    for wrong in [dtype for dtype in dtypes if dtype not in measure.DTYPES]:
        raise UserError(f"Dtype '{wrong}' is not one of {', '.join(measure.DTYPES)}.")
    if args.megabytes < 1:
        raise UserError(f"--megabytes is {args.megabytes}, but at least 1 is needed.")
    device = torch.device("cuda", torch.cuda.current_device())
    write = sys.stdout.write
    copy = measure.copy_bandwidth(args.megabytes << 20, device)
    write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.megabytes} MiB, copy {copy:.0f} GB/s\n")
    write(f"{'codec':<14}{'dtype':<10}{'':<8}{'GB/s':>8}{'of copy':>9}  difference from the reference\n")
    wrong = 0
    for row in measure.speeds(device, args.megabytes, names, dtypes):
        wrong += row.largest_difference > 0 or not row.same_codes
        write(
            f"{row.name:<14}{row.dtype:<10}{row.direction:<8}{row.gigabytes_per_second:>8.0f}"
            f"{row.share_of_copy:>9.0%}  {row.largest_difference:g}{'' if row.same_codes else ', other codes'}\n"
        )
        sys.stdout.flush()
    return 1 if wrong else 0


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError("adacc kernels needs Triton; install the triton that your torch asks for.")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UserError("TRITON_INTERPRET is set, so Triton would interpret the kernels; unset it to compile them.")
