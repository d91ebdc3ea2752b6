"""`adacc run`: a script that knows nothing of us, with our flags; and Megatron's random numbers on the CPU."""

import json
import sys
from pathlib import Path

import pytest

from megatron_adacc.cli import main

SCRIPT = Path(__file__).parent / "plain_script.py"


@pytest.fixture
def adacc_run(jobs, tmp_path):
    """adacc_run(torchrun options, **flags) -> (exit code, text)."""

    def run(*options, script=SCRIPT, **settings):
        own = {name.replace("_", "-"): value for name, value in settings.items()}
        tokens = jobs.flags({**jobs.MODEL, "mock-data": True, "train-iters": 4, **own})
        command = [sys.executable, "-m", "megatron_adacc.cli", "run", *options, str(script), *tokens]
        return jobs.finish(jobs.start(command))

    return run


def test_a_strict_script_takes_our_flags(adacc_run, tmp_path):
    losses = {}
    for plan in ("off", "full"):
        report = tmp_path / f"{plan}.json"
        code, text = adacc_run(adacc_plan=plan, adacc_report=report)
        assert code == 0, text[-4000:]
        written = json.loads(report.read_text())
        assert written["summary"]["strategy"] == plan
        losses[plan] = [row["lm_loss"] for row in written["iterations"]]
    assert len(losses["off"]) == 4
    assert losses["off"] == losses["full"]


def test_our_own_script_runs_through_it_as_well(adacc_run, jobs):
    code, text = adacc_run(script=jobs.ROOT / "pretrain_gpt.py", adacc_plan="full", train_iters=1)
    assert code == 0, text[-4000:]
    assert text.count("adacc: training on the CPU") == 1


@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_on_tensor_parallel_ranks_is_that_of_a_real_device(adacc_run, sequence_parallel):
    code, text = adacc_run(
        "--nproc-per-node=2",
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        num_workers=1,
    )
    assert code == 0, text[-4000:]
    (line,) = (line for line in text.splitlines() if line.startswith("same on all tensor-parallel ranks"))
    # Two layer norms a layer, the final one, the position embedding and the row-parallel biases.
    assert "{'replicated parameters': True, 'default draws': True, 'forked draws': False}" in line


def test_the_exit_code_and_the_sentence_of_the_script_come_through(adacc_run):
    code, text = adacc_run(adacc_plan="ful")
    assert code == 2
    assert "plain_script.py: error: --adacc-plan is 'ful'" in text
    assert "adacc run: rank 0 ended with exit code 2; the job was stopped." in text
    assert "Traceback" not in text


def test_a_script_that_is_not_there(capsys):
    assert main(["run", "nowhere.py"]) == 2
    assert "There is no script nowhere.py" in capsys.readouterr().err


def test_no_script(capsys):
    assert main(["run", "--nproc-per-node", "2"]) == 2
    assert "script" in capsys.readouterr().err


def test_a_port_in_use(capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["run", "--master-port", str(port), str(SCRIPT)]) == 2
    assert f"--master-port {port} is in use" in capsys.readouterr().err
