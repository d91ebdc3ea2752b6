"""Running Megatron where there is no CUDA."""

import os

from megatron_adacc.errors import UserError

DEVICES = ("cpu", "cuda")


def choose(requested: str | None) -> str:
    """'cpu' or 'cuda': what was requested, or CUDA where a GPU answers.

    Call it before anything else asks CUDA a question: a forced CPU hides the GPUs from this process, and
    the driver reads that wish only once. Raises UserError for an unknown device and for a GPU that is not
    there.
    """
    if requested is not None and requested not in DEVICES:
        raise UserError(f"--adacc-device is {requested!r}, but the known devices are {', '.join(DEVICES)}.")
    if requested == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if requested == "cuda":
        built = torch.version.cuda
        reason = "no GPU answers" if built else "this PyTorch was built without CUDA"
        raise UserError(
            f"--adacc-device cuda asks for a GPU, but {reason} on this machine: leave the flag out to run on the "
            "CPU, or see `adacc doctor`."
        )
    return "cpu"
