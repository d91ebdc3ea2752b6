"""Forks the ranks of training jobs from a process that has imported Megatron already.

A rank pays seconds for imports before it trains for half of one; a suite of a hundred small jobs would
mostly import. This process imports once and forks every rank of every job. What runs in a rank is the
script, from its first line, as __main__: only the modules it imports are there already.

Jobs come as JSON lines on standard input: {"script", "arguments", "ranks", "environment", "output"}; each is
answered with one line on standard output, {"code"}.
"""

import gc
import itertools
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback

# The bridge sizes its tuple of generators by this when it is installed; four is what the tests need at most.
os.environ["LOCAL_WORLD_SIZE"] = "4"

from megatron_adacc.devices import cpu

cpu.install()

import importlib

for name in (
    "megatron.core.models.gpt",
    "megatron.training",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "transformers.tokenization_utils_tokenizers",
    "megatron_adacc.megatron.batches",
    "megatron_adacc.megatron.observe",
):
    importlib.import_module(name)


def warm_up_compiler() -> None:
    """What the first compilation of a process imports and finds out costs it two seconds more."""
    import torch

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.nn.functional.gelu(x), 0.1).sum()

    # No backward: its threads would forbid ranks to have one. No pool of processes: it would not survive a fork.
    with torch._inductor.config.patch(compile_threads=1), torch.no_grad():
        torch.compile(block)(torch.ones(8, 8))
    torch._dynamo.reset()


warm_up_compiler()

GRACE_SECONDS = 5.0


# Below the ports that a system gives out by itself, and a range for each worker of the suite: between looking and
# binding nobody else takes a port.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.cycle(range(20000 + 2500 * (_WORKER % 4), 22500 + 2500 * (_WORKER % 4)))


def free_port() -> int:
    """A port that nobody listens on, another one each time."""
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("a cycle has no end")


def be_rank(job: dict, rank: int, port: int) -> None:
    """Never returns: runs the script and ends this process with its exit code."""
    code = 1
    try:
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.pop("LOCAL_WORLD_SIZE")
        os.environ.update(job["environment"])
        if job["ranks"] > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(job["ranks"]),
                LOCAL_WORLD_SIZE=str(job["ranks"]),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        sys.argv = [job["script"], *job["arguments"]]
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(children: dict[int, int]) -> int:
    """The exit code of the job: the first failure's. Ranks that outlive a failure are ended, as torchrun does."""
    code, deadline = 0, None
    while children:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended in children:
            children.pop(ended)
            found = os.waitstatus_to_exitcode(status)
            if found != 0 and code == 0:
                code, deadline = found, time.monotonic() + GRACE_SECONDS
                for child in children:
                    os.kill(child, signal.SIGTERM)
        elif deadline is not None and time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
            deadline = None
        else:
            time.sleep(0.01)
    return code


def main() -> None:
    # A collection in a rank would touch all that it shares with this process, and so copy it.
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        port, children = free_port(), {}
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                be_rank(job, rank, port)
            children[child] = rank
        print(json.dumps({"code": wait_for(children)}), flush=True)


if __name__ == "__main__":
    main()
