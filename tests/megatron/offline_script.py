"""One of several real ranks on the CPU: writes what its stage's traces are, to be compared with those of a lone rank.

offline_script.py FOLDER [Megatron's flags]
"""

import json
import os
import sys
from pathlib import Path

from megatron_adacc.megatron import launch, offline

# Megatron's tracker compares the host generator's state before and after a fork; a lone rank forks nothing.
GENERATOR_CHECK = ("aten.eq.Tensor", "aten.all.default")


def summary(stage: offline.Stage) -> list:
    """For each class of layers, its places, its ops with what they write, and what autograd saves."""
    rows = []
    for layers in stage.layers:
        graph = layers.graph
        ops = []
        for op in graph.ops:
            if op.target not in GENERATOR_CHECK:
                bases = [graph.buffers[b].base for b in op.writes]
                ops.append([op.target, op.collective, [[list(base.size), base.dtype] for base in bases]])
        packs = []
        for view in (pack.view for pack in graph.packs):
            packs.append([graph.buffers[view.buffer].site, list(view.size), list(view.stride), view.offset, view.dtype])
        rows.append({"places": list(layers.places), "ops": ops, "packs": packs, "bytes": layers.activation_bytes})
    return rows


def main() -> None:
    """Start Megatron as a rank of the job, build its stage with real parameters and trace it."""
    folder, *flags = sys.argv[1:]
    sys.argv = ["offline_script.py", *flags]
    launch.prepare("offline_script.py")
    from megatron.training import arguments, initialize

    args = arguments.parse_and_validate_args()
    initialize.initialize_megatron()
    content = summary(offline.trace_stage(args, 0))
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
