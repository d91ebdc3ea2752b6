"""A job of scripts/reproduce_4_7b.sh at the size of --cpu-scale; tests/scripts/test_reproduce.py runs the script."""

from pathlib import Path

import pytest

from megatron_adacc.megatron.reproduce_jobs import ENVIRONMENT, EXPERIMENTS, METHODS, job_flags

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]


def test_tensor_parallel_under_auto(zygote, tmp_path: Path) -> None:
    experiment, report = EXPERIMENTS["4.7b"].for_cpu(), tmp_path / "report.json"
    assert (experiment.tensor, experiment.ranks) == (2, 2)
    flags = job_flags(experiment, METHODS["adacc"], 2, 3, report)
    output = tmp_path / "output.txt"
    code = zygote.run(ROOT / "pretrain_gpt.py", flags, experiment.ranks, ENVIRONMENT, output)
    assert code == 0, output.read_text()[-4000:]
    assert report.exists()
