"""Prints, as JSON, the memory model beside Megatron's own estimate for each argument: a YAML, ranks, and flags."""

import json
import sys

from megatron_adacc.megatron.memory_check import (
    megatron_outside_bytes,
    megatron_static_bytes,
    outside_differences,
    static_differences,
)
from megatron_adacc.megatron.read_job import args_of_flags, job_of_args
from megatron_adacc.megatron.trace_flags import flags_of_file


def main(config, world, *flags):
    args = args_of_flags("memory_check_script.py", [*flags_of_file(config), *flags], int(world), cuda=True)
    job = job_of_args(args, cuda=True)
    (outer,) = job.outer_bytes(0)
    return {
        "parameters": job.parameters(0),
        "static": job.static_bytes(0).total,
        "megatron_static": megatron_static_bytes(args, job),
        "static_differences": static_differences(job),
        "outside": outer.held,
        "megatron_outside": megatron_outside_bytes(args, job),
        "outside_differences": outside_differences(job),
    }


print("JSON" + json.dumps([main(*words.split(",")) for words in sys.argv[1:]]))
