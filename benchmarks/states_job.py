"""pretrain_gpt.py that writes the CPU milliseconds of each training step to the file CPU_TIMES, as JSON.

CPU_TIMES=times.json python benchmarks/states_job.py <flags of pretrain_gpt.py, --adacc-report among them>
"""

import atexit
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from megatron_adacc.megatron import launch

# Before Megatron is imported: it imports names of torch.cuda by value.
launch.prepare("pretrain_gpt.py")

from megatron_adacc.megatron import observe

ROOT = Path(__file__).resolve().parent.parent
milliseconds: list[float] = []
around_step = observe.Observer.around_step


def timed(observer: observe.Observer, step: Any) -> tuple:
    begun = time.process_time()
    result = around_step(observer, step)
    milliseconds.append((time.process_time() - begun) * 1e3)
    return result


observe.Observer.around_step = timed  # type: ignore
atexit.register(lambda: Path(os.environ["CPU_TIMES"]).write_text(json.dumps(milliseconds)))
sys.argv[0] = str(ROOT / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
