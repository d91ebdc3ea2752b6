"""The jobs of scripts/reproduce_*.sh at the size of --cpu-scale; tests/scripts/test_reproduce.py runs the script."""

from pathlib import Path

import pytest

from megatron_adacc.megatron.reproduce_jobs import EXPERIMENTS, METHODS, job_flags

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("key", "method"), [("345m", "quantization"), ("4.7b", "adacc")])
def test_it_runs(key: str, method: str, zygote, tmp_path: Path) -> None:
    experiment, report = EXPERIMENTS[key].for_cpu(), tmp_path / "report.json"
    flags = job_flags(experiment, METHODS[method], 2, 3, report)
    output = tmp_path / "output.txt"
    code = zygote.run(ROOT / "pretrain_gpt.py", flags, experiment.ranks, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, output)
    assert code == 0, output.read_text()[-4000:]
