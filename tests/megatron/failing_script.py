"""pretrain_gpt.py in which allocations are refused: at the pack of number FAIL_AT, FAIL_TIMES times, in step FAIL_STEP.

Or, with EXCESS_STEP, in which a rank says that it holds EXCESS bytes too many; or, with KILL_AT, which is killed in
that step, after KILL_PACK packs. ONLY_RANK: on that rank alone. With SWEEP, in step n from the third on the pack of
number n - 2 is refused."""

import os
import runpy
import signal
import sys
from pathlib import Path

import torch

from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.runtime.stash import Stash

ROOT = Path(__file__).resolve().parents[2]


def number(name):
    return int(os.environ.get(name, "0"))


left, times = number("FAIL_AT"), number("FAIL_TIMES") or 1
step, packs = 1, 0
swept = set()
pack, end, excess = Stash.pack, AdaptiveHandle.step, AdaptiveHandle.memory_excess
mine = os.environ.get("ONLY_RANK") in (None, os.environ.get("RANK", "0"))


def failing(stash, tensor):
    global left, times, packs
    packs += 1
    if step == number("KILL_AT") and mine and packs > number("KILL_PACK"):
        os.kill(os.getpid(), signal.SIGKILL)
    if number("SWEEP") and packs == step - 2 and step not in swept:
        swept.add(step)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if step == number("FAIL_STEP") and times and mine:
        left -= 1
        if left <= 0:
            times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return pack(stash, tensor)


def ended(handle, *args):
    global step, packs
    end(handle, *args)
    step, packs = step + 1, 0


def beyond(handle):
    """As if this rank held so many bytes too much in the step."""
    global times
    if step == number("EXCESS_STEP") and mine and times:
        times -= 1
        return number("EXCESS")
    return excess(handle)


Stash.pack, AdaptiveHandle.step, AdaptiveHandle.memory_excess = failing, ended, beyond
sys.argv[0] = str(ROOT / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
