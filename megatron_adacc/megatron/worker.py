"""One rank of `adacc run`: prepare this process, then run the script as if it had been started itself.

torchrun --nproc-per-node N -m megatron_adacc.megatron.worker SCRIPT [flags]
"""

import os
import runpy
import sys

from megatron_adacc.megatron import launch


def main() -> None:
    """Run the script named by the first argument with the arguments that follow it."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: torchrun ... -m megatron_adacc.megatron.worker SCRIPT [flags]")
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    # A script finds its neighbours (gpt_builders.py beside upstream's pretrain_gpt.py) in its own folder.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    name = os.path.basename(script)
    launch.prepare(name)
    with launch.user_errors(name):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
