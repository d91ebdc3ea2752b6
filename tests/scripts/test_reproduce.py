"""scripts/reproduce_*.sh and `adacc reproduce`: the commands, a run of them at a small size, the tables."""

import json
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_adacc import cli
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import reproduce_records as records
from megatron_adacc.megatron.reproduce_command import grouped
from megatron_adacc.megatron.reproduce_jobs import EXPERIMENTS, METHODS, command, job_flags
from megatron_adacc.megatron.reproduce_records import FINISHED, NO_MEMORY, Record
from megatron_adacc.megatron.reproduce_tables import tables

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "reproduce.py"


@pytest.fixture(scope="module")
def script():
    """The names of scripts/reproduce.py."""
    return runpy.run_path(str(SCRIPT))


def call(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=200)


def one(method: str, micro_batch: int, samples: float | None = None, **changes) -> Record:
    """A record of GPT-117M on eight GPUs, with figures where it finished."""
    made = Record("117m", method, micro_batch, 512, 8, False, False, (), NO_MEMORY if samples is None else FINISHED)
    if samples is not None:
        step_ms = 8e3 * micro_batch / samples
        made = replace(
            made, device="a GPU", iterations=30, step_ms=step_ms, samples_per_second=samples, held_bytes=75,
            peak_bytes=100, final_loss=9.5,
        )  # fmt: skip
    return replace(made, **changes)


class TestWrappers:
    @pytest.mark.parametrize(("name", "key"), [("117m", "117m"), ("345m", "345m"), ("4_7b", "4.7b")])
    def test_sets_up_and_hands_on(self, name: str, key: str, tmp_path: Path) -> None:
        """In a tree whose set-up and Python only say how they were called."""
        (tmp_path / "scripts").mkdir()
        (tmp_path / ".venv" / "bin").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / f"reproduce_{name}.sh", tmp_path / "scripts")
        (tmp_path / "scripts" / "setup.sh").write_text("echo set up\n")
        python = tmp_path / ".venv" / "bin" / "python"
        python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
        python.chmod(0o755)
        called = ["bash", str(tmp_path / "scripts" / f"reproduce_{name}.sh"), "--dry-run", "--", "--a b"]
        done = subprocess.run(called, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0
        assert done.stdout.splitlines() == [f"{tmp_path}/scripts/reproduce.py", key, "--dry-run", "--", "--a b"]
        assert done.stderr == "set up\n"
        assert (ROOT / "scripts" / f"reproduce_{name}.sh").stat().st_mode & 0o111


class TestCommands:
    @pytest.mark.parametrize(
        ("key", "layers", "layout", "sequence"),
        [("117m", 12, (1, 1, 8), 512), ("345m", 24, (1, 1, 8), 1024), ("4.7b", 24, (8, 1, 1), 1024)],
    )
    def test_megatron_takes_them(self, key: str, layers: int, layout: tuple, sequence: int, tmp_path: Path) -> None:
        """The full size, read by Megatron's own parser as if on eight GPUs."""
        from megatron_adacc.megatron.read_job import args_of_flags

        experiment = EXPERIMENTS[key]
        flags = job_flags(experiment, METHODS["adacc-lossy"], 4, 30, tmp_path / "r.json")
        tokens = command(experiment, ROOT / "pretrain_gpt.py", flags)
        assert tokens[1:4] == ["--standalone", "--nproc-per-node", "8"]
        args = args_of_flags("test", flags, 8, cuda=True)
        found = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size
        assert (args.num_layers, args.seq_length, found) == (layers, sequence, layout)
        assert (args.fp16, args.transformer_impl, args.sequence_parallel) == (True, "local", layout[0] > 1)
        assert args.global_batch_size == 4 * layout[2]
        assert (args.adacc_plan, args.adacc_error_budget, args.adacc_warmup_steps) == ("auto", 0.02, 0)

    def test_small_ones_differ_in_sizes_only(self, tmp_path: Path) -> None:
        for experiment in EXPERIMENTS.values():
            large, small = (
                job_flags(kind, METHODS["full"], 2, 30, tmp_path / "r.json")
                for kind in (experiment, experiment.for_cpu())
            )
            names = [[token for token in flags if token.startswith("--")] for flags in (large, small)]
            assert [name for name in names[1] if name not in names[0]] == ["--num-workers", "--adacc-device"]
            assert [name for name in names[0] if name not in names[1]] == []

    def test_real_text(self, tmp_path: Path) -> None:
        flags = job_flags(
            EXPERIMENTS["117m"], METHODS["full"], 2, 30, tmp_path / "r.json", tmp_path, ("--clip-grad", "2")
        )
        assert flags[flags.index("--data-path") + 1] == str(tmp_path / "text_document")
        assert "--vocab-size" not in flags
        assert "--mock-data" not in flags
        assert flags[-2:] == ["--clip-grad", "2"]


class TestDryRun:
    def test_command_and_prediction(self, capsys: pytest.CaptureFixture, script: dict, tmp_path: Path) -> None:
        """The command is what a run would start; the figures are those of `adacc plan`."""
        options = ["--method", "baseline", "--method", "full", "--micro-batch", "64", "--output", str(tmp_path)]
        assert script["main"](["117m", "--dry-run", *options]) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if "torchrun" in line]
        assert len(lines) == 2
        report = tmp_path / "117m" / "baseline-64.report.json"
        flags = job_flags(EXPERIMENTS["117m"], METHODS["baseline"], 64, 30, report)
        expected = command(EXPERIMENTS["117m"], ROOT / "pretrain_gpt.py", flags)
        assert shlex.split(lines[0]) == ["CUDA_DEVICE_MAX_CONNECTIONS=1", *expected]
        assert list(tmp_path.iterdir()) == []
        config = ["--config", str(ROOT / "configs" / "gpt_117m.yaml"), "--device", "v100-32gb", "--world", "8"]
        sizes = ["--seq-length", "512", "--max-position-embeddings", "512", "--micro-batch", "64", "--json", "-"]
        assert cli.main(["plan", *config, *sizes]) == 0
        planned = json.loads(capsys.readouterr().out)["strategies"]
        table = [line for line in out.splitlines() if "torchrun" not in line and "#" not in line]
        for name, strategy, fits in (("Baseline", "none", "no"), ("Full Recomp", "full", "yes")):
            (row,) = [line.replace("│", " ").split() for line in table if name in line]
            figures = planned[strategy]["samples_per_second"], planned[strategy]["step_ms"]
            assert [f"{number:.1f}" for number in figures] == row[-5:-3]
            assert [f"{planned[strategy][key] / 2**30:.2f}" for key in ("held_bytes", "peak_bytes")] == row[-3:-1]
            assert row[-1] == fits
        full = f"{planned['full']['samples_per_second']:.1f}"
        assert f"| 64 | does not fit | {full} |" in (ROOT / "docs" / "reproduction.md").read_text()

    def test_no_prediction_for_a_cpu(self) -> None:
        done = call("4.7b", "--dry-run", "--cpu-scale", "--micro-batch", "2", "--method", "adacc")
        assert done.returncode == 0
        assert "--nproc-per-node 2" in done.stdout
        assert "--tensor-model-parallel-size 2" in done.stdout
        assert "No prediction" in done.stdout


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["4.7b", "--ranks", "4", "--dry-run"], "split over 8: give a multiple"),
            (["117m", "--cpu-scale", "--largest"], "leave out --largest"),
            (["117m", "--dry-run", "--largest"], "adacc reproduce --predict"),
            (["117m", "--dry-run", "--data", "/nowhere"], "has no tokenizer"),
            (["117m", "--dry-run", "--", "--seq-length=64"], "--seq-length is what the runs are sorted by"),
            (["117m", "--dry-run", "--device", "abacus", "--micro-batch", "1"], "abacus"),
        ],
    )
    def test_a_sentence(self, arguments: list[str], words: str, script: dict, capsys: pytest.CaptureFixture) -> None:
        assert script["main"](arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("scripts/reproduce_")
        assert words in error

    def test_too_few_gpus(self, script: dict) -> None:
        with pytest.raises(UserError, match=r"has \d+ GPUs that torch sees, and the run needs 4096"):
            script["need_gpus"](4096)

    @pytest.mark.parametrize("text", ["0", "x"])
    def test_no_number(self, text: str) -> None:
        done = call("117m", "--micro-batch", text)
        assert done.returncode == 2
        assert "whole number from 1 up" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.distributed
def test_a_run_at_cpu_scale(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By torchrun on two ranks; recorded, not run again, and in the tables."""
    options = ["117m", "--cpu-scale", "--method", "full", "--micro-batch", "2", "--iterations", "3"]
    done = call(*options, "--output", tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (found,) = records.load(tmp_path)
    assert (found.model, found.method, found.micro_batch) == ("117m", "full", 2)
    assert (found.small, found.ranks) == (True, 2)
    assert (found.outcome, found.iterations) == (FINISHED, 3)
    assert found.samples_per_second == pytest.approx(4e3 / found.step_ms)
    again = call(*options, "--output", tmp_path)
    assert "finished, as recorded in full-2.run.json" in again.stdout
    assert cli.main(["reproduce", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "small sizes on 2 ranks of the CPU" in out
    assert f"{found.samples_per_second:.1f}" in out
    assert f"{found.final_loss:.6f}" in out


# Stands for torchrun and the job: up to five samples get their memory, and a clip of 9 is a bug.
FAKE_JOB = """
import json, sys
value = {flag: text for flag, text in zip(sys.argv, sys.argv[1:]) if flag.startswith("--")}
size = int(value["--micro-batch-size"])
if value["--clip-grad"] == "9":
    sys.exit("AssertionError: something else")
if size > 5:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory.")
summary = {"iterations": int(value["--train-iters"]), "step_ms_median": 100.0, "held_bytes": 1, "peak_bytes": 2}
summary |= {"final_lm_loss": 9.5}
report = {"summary": summary, "device": "a GPU", "run": {"global_batch_size": int(value["--global-batch-size"])}}
json.dump(report, open(value["--adacc-report"], "w"))
"""


class TestRunner:
    @pytest.fixture(autouse=True)
    def fake(self, script: dict, monkeypatch: pytest.MonkeyPatch) -> None:
        names = script["run"].__globals__
        monkeypatch.setitem(names, "command", lambda experiment, path, flags: [sys.executable, "-c", FAKE_JOB, *flags])
        monkeypatch.setitem(names, "need_gpus", lambda number: None)

    def test_what_got_no_memory_is_recorded(self, script: dict, tmp_path: Path) -> None:
        options = ["--method", "full", "--micro-batch", "4", "--micro-batch", "8", "--output", str(tmp_path)]
        assert script["main"](["345m", *options]) == 0
        found = records.load(tmp_path)
        assert [(run.micro_batch, run.outcome) for run in found] == [(4, FINISHED), (8, NO_MEMORY)]
        assert [run.samples_per_second for run in found] == [320.0, None]
        assert (found[0].device, found[0].iterations, found[0].peak_bytes) == ("a GPU", 30, 2)
        assert "CUDA out of memory" in (tmp_path / "345m" / "full-8.log").read_text()

    def test_the_largest(self, script: dict, tmp_path: Path) -> None:
        options = ["--largest", "--method", "adacc", "--micro-batch", "2", "--output", str(tmp_path)]
        assert script["main"](["117m", *options]) == 0
        found = records.load(tmp_path)
        assert [run.micro_batch for run in found if run.outcome == FINISHED] == [2, 4, 5]
        assert all(run.search for run in found)
        assert {run.iterations for run in found} == {3, None}
        assert tables(EXPERIMENTS["117m"], None, found)[0].rows[3] == ("Adacc, lossless", "136", "", "5")

    def test_another_failure_stops(self, script: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        options = ["--method", "full", "--micro-batch", "4", "--output", str(tmp_path), "--", "--clip-grad", "9"]
        with pytest.raises(SystemExit) as ended:
            script["main"](["117m", *options])
        assert ended.value.code == 1
        out = capsys.readouterr().out
        assert "AssertionError: something else" in out
        assert "its log is" in out
        assert records.load(tmp_path) == []

    def test_other_flags_run_again(self, script: dict, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        options = ["--method", "full", "--micro-batch", "4", "--output", str(tmp_path)]
        for extra, again in (([], False), ([], True), (["--", "--clip-grad", "2"], False)):
            assert script["main"](["117m", *options, *extra]) == 0
            assert ("as recorded in" in capsys.readouterr().out) == again
        assert [run.extra for run in records.load(tmp_path)] == [("--clip-grad", "2")]


class TestOutcome:
    @pytest.mark.parametrize(
        ("code", "text", "expected"),
        [
            (0, "out of memory, as somebody said", FINISHED),
            (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", NO_MEMORY),
            (2, "pretrain_gpt.py: error: Step 1 did not get its memory (refused)", NO_MEMORY),
            (2, "error: No plan fits into 30 GiB: the least limit that works is 31 GiB", NO_MEMORY),
            (1, "AssertionError", None),
        ],
    )
    def test_of_a_job(self, code: int, text: str, expected: str | None) -> None:
        assert records.outcome_of(code, text) == expected

    @pytest.mark.parametrize("most", [0, 1, 2, 7, 8, 57, 59, 64, 130])
    @pytest.mark.parametrize("guess", [1, 24, 128])
    def test_search(self, most: int, guess: int, script: dict) -> None:
        asked: list[int] = []

        def fits(size: int) -> bool:
            assert size not in asked
            asked.append(size)
            return size <= most

        assert script["largest"](fits, guess) == most
        assert len(asked) < 18


class TestTables:
    def test_throughput_largest_and_loss(self) -> None:
        runs = [
            one("baseline", 8, 100.0), one("full", 8, 75.0), one("quantization", 8, 80.0, final_loss=9.75),
            one("baseline", 64), one("full", 64, 90.0), one("adacc", 64, 108.0),
            one("adacc", 136, 110.0, search=True), one("adacc", 137, search=True),
            one("baseline", 57, 101.0, search=True),
        ]  # fmt: skip
        throughput, loss, largest, claims = tables(EXPERIMENTS["117m"], None, runs)
        assert throughput.title == "GPT-117M, sequence 512: samples a second, measured: 8 x a GPU"
        unknown = "not measured"
        assert throughput.rows == (
            ("8", "100.0", "75.0", "80.0", unknown, unknown),
            ("64", "no memory", "90.0", unknown, "108.0", unknown),
        )
        assert loss.rows[:4] == (
            ("Baseline", "9.500000", "+0.000000"), ("Full Recomp", "9.500000", "+0.000000"),
            ("Quantization", "9.750000", "+0.250000"), ("Adacc, lossless", unknown, ""),
        )  # fmt: skip
        assert "micro-batch 8 after 30 iterations" in loss.title
        assert [row[1:] for row in largest.rows] == [
            ("57", "", "57 (not 64)"), ("", "", "64"), ("", "", "8"), ("136", "", "136"), ("", "", unknown)
        ]  # fmt: skip
        assert [row[1:] for row in claims.rows] == [
            ("28-33 %", "", "33 %"), ("1.01-1.37", "", "1.20"), ("1.01-1.37", "", unknown)
        ]  # fmt: skip

    def test_losses_without_a_baseline(self) -> None:
        runs = [one("full", 8, 75.0), one("adacc", 8, 80.0, final_loss=9.25), one("adacc", 64, 90.0)]
        loss = tables(EXPERIMENTS["117m"], None, runs)[1]
        assert "micro-batch 8" in loss.title
        assert [row[1:] for row in loss.rows[1:4:2]] == [("9.500000", ""), ("9.250000", "")]

    def test_predictions_stand_beside_the_paper(self) -> None:
        figures = {"held_bytes": 73, "peak_bytes": 100}
        times = {"baseline": 100.0, "full": 130.0, "quantization": 120.0, "adacc": 100.0, "adacc-lossy": 96.0}
        runs = {
            (key, 8): {"samples_per_second": 8e3 / time, "step_ms": time, "fits": key != "adacc-lossy", **figures}
            for key, time in times.items()
        }
        prediction = {"device": "V100", "runs": runs, "largest": dict.fromkeys(times, 11)}
        throughput, largest, claims = tables(EXPERIMENTS["345m"], prediction, [])
        assert throughput.title == "GPT-345M, sequence 1024: samples a second, predicted for 8 x V100"
        assert throughput.rows == (("8", "80.0", "61.5", "66.7", "80.0", "does not fit"),)
        assert {row[1:] for row in largest.rows} == {("", "11", "not measured")}
        assert [row[1:] for row in claims.rows] == [
            ("28-33 %", "30 %", "not measured"), ("1.01-1.37", "1.20", "not measured"),
            ("1.01-1.37", "", "not measured"), ("76 %", "73 %", "not measured"),
        ]  # fmt: skip
        assert "| 8 | 80.0 | 61.5 | 66.7 | 80.0 | does not fit |\n" in throughput.markdown()

    def test_devices_sequences_and_flags_are_not_mixed(self) -> None:
        runs = [
            one("baseline", 8, 1.0), one("baseline", 8, 2.0, device="another GPU"), one("baseline", 64),
            one("full", 8, 3.0, sequence=1024), one("full", 8, 4.0, small=True, ranks=2),
            one("full", 8, 5.0, extra=("--x",)),
        ]  # fmt: skip
        found = [(experiment.sequence, experiment.small, len(group)) for experiment, group in grouped(runs)]
        assert found == [(512, False, 2), (512, False, 2), (1024, False, 1), (512, True, 1), (512, False, 1)]

    def test_nothing_there(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        assert cli.main(["reproduce", str(tmp_path)]) == 2
        assert "has no record of a run: run scripts/reproduce_*.sh first" in capsys.readouterr().err

    def test_a_broken_record(self, tmp_path: Path) -> None:
        path = tmp_path / "117m" / "full-8.run.json"
        path.parent.mkdir()
        path.write_text("{}")
        with pytest.raises(UserError, match="is no record of a run"):
            records.load(tmp_path)
        report = path.with_name("full-8.report.json")
        records.save(path, EXPERIMENTS["117m"], METHODS["full"], 8, False, (), FINISHED, ["x"], report)
        with pytest.raises(UserError, match=r"full-8\.report\.json cannot be read"):
            records.load(tmp_path)
        report.write_text('{"summary": {}}')
        with pytest.raises(UserError, match="lacks 'device'"):
            records.load(tmp_path)
