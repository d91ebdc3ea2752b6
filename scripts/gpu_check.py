"""The one script to run when a GPU is at hand: are the kernels right, are they fast, does training gain?

    python scripts/gpu_check.py [--output DIR]

Needs torch, Triton and this checkout; nothing has to be installed. Where megatron-core is there too, it trains
the same small GPT with each plan. Writes gpu_check.json and gpu_check.txt (the table) into DIR and prints the
table. Without a GPU it starts all the same and says what it skipped.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLANS = ("off", "full", "recompute", "compress")
# GPT-345M's layer shape with fewer layers, so that four runs take about two minutes.
MODEL = shlex.split(
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--position-embedding-type learned_absolute --micro-batch-size 8 --global-batch-size 8 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --seed 1234 "
    "--fp16 --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 99,1,0 "
    "--eval-interval 1000 --eval-iters 0 --num-workers 0 --log-interval 1"
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One part of the check: `outcome` is "passed", "failed" or "skipped", `reason` says why not passed."""

    name: str
    outcome: str
    reason: str
    seconds: float
    rows: list[dict]


class SkipError(Exception):
    """This part cannot run here; the message says why."""


def use_checkout() -> None:
    """Make megatron_adacc and its kernels importable from the checkout, if they are not installed."""
    sys.path.insert(0, str(ROOT))
    import megatron_adacc  # noqa: F401

    if importlib.util.find_spec("megatron_adacc.kernels") is None:
        folder = ROOT / "kernels"
        name = "megatron_adacc.kernels"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def machine() -> dict:
    """Device and versions."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": None, "triton": None, "device": None}
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is not None:
            facts[name] = importlib.import_module(name).__version__
    if facts["torch"] is not None:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            facts["device"] = properties.name
            facts["compute_capability"] = f"{properties.major}.{properties.minor}"
            facts["memory_bytes"] = properties.total_memory
            facts["cuda"] = torch.version.cuda
    return facts


def need_gpu(facts: dict) -> None:
    """Raise SkipError where the kernels cannot run."""
    missing = [name for name in ("torch", "triton") if facts[name] is None]
    if missing:
        raise SkipError(f"{' and '.join(missing)} not installed")
    if facts["device"] is None:
        raise SkipError("torch sees no CUDA device")


def check_kernels(facts: dict) -> list[dict]:
    """Every codec on the GPU against the reference on the CPU, on awkward tensors; all bits equal."""
    need_gpu(facts)
    import torch

    from megatron_adacc import codecs
    from megatron_adacc.kernels import load

    compare = load("measure", interpret=False).compare
    device, rows = torch.device("cuda", 0), []
    for name in codecs.names():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            # Each combination is a compilation; stochastic rounding does not depend on the dtype.
            stochastic = dtype is torch.float16 and name != "bitmask"
            for options in [{}, {"rounding": "stochastic", "seed": 5}] if stochastic else [{}]:
                distance, same, cases = 0.0, True, 0
                for x in awkward(name, dtype, device):
                    state = host = None
                    if name.startswith("outlier"):
                        last = x.shape[-1] - 1
                        state = codecs.OutlierState.from_channels([last], x.shape[-1], device)
                        host = codecs.OutlierState.from_channels([last], x.shape[-1], "cpu")
                    difference, equal = compare(codecs.get(name, **options), x, state, host)
                    distance, same, cases = max(distance, difference), same and equal, cases + 1
                rows.append(
                    {
                        "codec": name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "rounding": options.get("rounding", "nearest"),
                        "cases": cases,
                        "largest_difference": distance,
                        "same_codes": same,
                        "passed": same and distance == 0.0,
                    }
                )
    rows.append({"codec": "bitmask", "case": "a third value raises", "passed": third_value_raises(device)})
    return rows


def awkward(name: str, dtype: Any, device: Any) -> Iterator[Any]:
    """Tensors of odd sizes, strides and contents."""
    import torch

    generator = torch.Generator(device).manual_seed(3)
    for shape in [(1,), (127,), (129,), (3, 5, 128), (1000, 100), (257, 1024), (1 << 19,)]:
        x = torch.randn(shape, generator=generator, device=device)
        if name == "bitmask":
            yield torch.where(x < 0.5, 1 / 0.9, 0.0).to(dtype)
            continue
        if x.numel() > 200:
            flat = x.view(-1)
            flat[3], flat[50], flat[90] = float("inf"), float("nan"), float("-inf")
            flat[100:190] = 0.25
        yield x.to(dtype)
    square = torch.randn(300, 256, generator=generator, device=device)
    if name == "bitmask":
        square = (square < 0) * 2.0
    for view in (square.T, square[:, ::2], square[1:]):
        yield view.to(dtype)


def third_value_raises(device: Any) -> bool:
    """Whether both kinds of check find a tensor with three values."""
    import torch

    from megatron_adacc import codecs

    x, codec, found = torch.arange(3.0, device=device), codecs.get("bitmask"), 0
    try:
        codec.encode(x)
    except codecs.NotTwoValuedError:
        found += 1
    state = codecs.BitmaskState.on(device)
    decoded = codec.decode(codec.encode(x, state))
    try:
        state.raise_if_violated()
    except codecs.NotTwoValuedError:
        found += 1
    return found == 2 and bool(decoded.isnan().all())


def measure_speed(facts: dict) -> list[dict]:
    """GB/s of every codec on 64 and 256 MiB, beside a copy."""
    need_gpu(facts)
    import torch

    from megatron_adacc import codecs
    from megatron_adacc.kernels import load

    measure, device, rows = load("measure", interpret=False), torch.device("cuda", 0), []
    dtypes = ("float16",) if torch.cuda.get_device_capability()[0] < 8 else ("float16", "bfloat16")
    for megabytes in (64, 256):
        rows.append({"megabytes": megabytes, "copy_gb_per_s": measure.copy_bandwidth(megabytes << 20, device)})
        for speed in measure.speeds(device, megabytes, codecs.names(), dtypes):
            fine = speed.same_codes and speed.largest_difference == 0.0
            rows.append({"megabytes": megabytes, **dataclasses.asdict(speed), "passed": fine})
    return rows


def train(facts: dict, output: Path, iterations: int) -> list[dict]:
    """The same GPT with each plan: time, bytes held for backward, peak, loss."""
    need_gpu(facts)
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.training") is None:
        raise SkipError("megatron-core is not installed")
    rows = []
    for plan in PLANS:
        report, log = output / f"train_{plan}.json", output / f"train_{plan}.log"
        report.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
            *(str(ROOT / "pretrain_gpt.py"), *MODEL),
            *("--train-iters", str(iterations), "--lr-decay-iters", str(iterations)),
            *("--adacc-plan", plan, "--adacc-report", str(report)),
        ]
        with log.open("w") as file:
            try:
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, timeout=60).returncode
            except subprocess.TimeoutExpired:
                code = 124
        if code == 0 and report.exists():
            rows.append({**json.loads(report.read_text())["summary"], "passed": True})
        else:
            last = log.read_text().strip().splitlines()[-1:] or ["no output"]
            rows.append({"strategy": plan, "passed": False, "error": f"exit code {code}: {last[0]}"})
    return rows


def carry_out(name: str, part: Callable[[], list[dict]]) -> Step:
    """Run one part; a failure of it does not stop the others."""
    started = time.monotonic()
    try:
        rows = part()
    except SkipError as skipped:
        return Step(name, "skipped", str(skipped), time.monotonic() - started, [])
    except Exception as error:  # the script reports whatever went wrong and goes on with the next part
        return Step(name, "failed", f"{type(error).__name__}: {error}", time.monotonic() - started, [])
    failed = sum(not row.get("passed", True) for row in rows)
    outcome = "failed" if failed else "passed"
    reason = f"{failed} of {len(rows)} rows" if failed else ""
    return Step(name, outcome, reason, time.monotonic() - started, rows)


def table(facts: dict, steps: list[Step]) -> str:
    """All of it as text."""
    lines = [", ".join(f"{name} {value}" for name, value in facts.items())]
    for step in steps:
        lines.append(f"\n{step.name}: {step.outcome}{f' ({step.reason})' if step.reason else ''}, {step.seconds:.0f} s")
        for row in step.rows:
            cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
            lines.append("  " + "  ".join(f"{cell:<12}" for cell in cells))
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run every part, write the JSON and the table; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "runs" / "gpu_check", metavar="DIR", help="where to write"
    )
    parser.add_argument("--iterations", type=int, default=12, metavar="N", help="training iterations for each plan")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    use_checkout()
    facts = machine()
    steps = [
        carry_out("kernels against the reference", lambda: check_kernels(facts)),
        carry_out("speed", lambda: measure_speed(facts)),
        carry_out("training", lambda: train(facts, args.output, args.iterations)),
    ]
    text = table(facts, steps)
    (args.output / "gpu_check.txt").write_text(text)
    result = {"machine": facts, "steps": [dataclasses.asdict(step) for step in steps]}
    (args.output / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    print(text + f"\n{args.output / 'gpu_check.json'}")
    return 1 if any(step.outcome == "failed" for step in steps) else 0


if __name__ == "__main__":
    sys.exit(main())
