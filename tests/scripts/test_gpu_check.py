"""scripts/gpu_check.py starts without a GPU and says what it skipped."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


def test_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [step["outcome"] for step in result["steps"]] == ["skipped"] * 3
    assert all(step["reason"] == "torch sees no CUDA device" for step in result["steps"])
    assert result["machine"]["device"] is None
    assert "speed: skipped (torch sees no CUDA device)" in done.stdout
    assert (tmp_path / "gpu_check.txt").read_text() in done.stdout


def test_from_a_bare_checkout(tmp_path: Path) -> None:
    """Nothing installed: the kernels come from the folder beside the script."""
    code = (
        "import sys, importlib.util, runpy\n"
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        f"module = runpy.run_path({str(SCRIPT)!r})\n"
        "module['use_checkout']()\n"
        "from megatron_adacc import codecs, kernels\n"
        "import torch\n"
        "codec = codecs.get('group_int4', implementation='interpret')\n"
        "assert torch.equal(codec.decode(codec.encode(torch.full((5,), 3.0))), torch.full((5,), 3.0))\n"
        f"assert kernels.__file__ == {str(ROOT / 'kernels' / '__init__.py')!r}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_part_that_fails_does_not_stop_the_rest(script) -> None:
    def broken() -> list[dict]:
        raise RuntimeError("no such thing")

    assert script.carry_out("a", broken).outcome == "failed"
    assert script.carry_out("a", broken).reason == "RuntimeError: no such thing"
    step = script.carry_out("b", lambda: [{"passed": True}, {"passed": False}])
    assert (step.outcome, step.reason) == ("failed", "1 of 2 rows")
    assert script.carry_out("c", lambda: [{"passed": True}, {"note": 1}]).outcome == "passed"


def test_the_comparisons_see_a_difference(script) -> None:
    """The checks that would run on a GPU, run here on the CPU with the reference in the GPU's place."""
    import torch

    from megatron_adacc import codecs
    from megatron_adacc.kernels import load

    measure = load("measure", interpret=False)
    for name in codecs.names():
        for x in script.awkward(name, torch.float32, torch.device("cpu")):
            assert measure.compare(codecs.get(name, implementation="torch"), x, None, None) == (0.0, True)
    x = torch.randn(300)
    other = codecs.get("group_int4", implementation="torch", rounding="stochastic", seed=1)
    reference = codecs.get("group_int4", implementation="torch")
    assert measure._distance(other.decode(other.encode(x)), reference.decode(reference.encode(x))) > 0.01
    assert not measure._equal(other.encode(x), reference.encode(x))
    assert measure._distance(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
