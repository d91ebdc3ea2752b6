"""adacc memory: tables, JSON, sentences; the configs; the comparison with Megatron's own estimate."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_adacc import cli
from megatron_adacc.megatron.trace_flags import flags_of_file

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
# Parameters with padded vocabulary.
COUNTS = {
    "gpt_117m": 124_475_904,
    "gpt_345m": 354_871_296,
    "gpt_4_7b": 5_043_363_840,
    "llama_1_3b": 1_345_423_360,
    "llama_7b": 6_738_415_616,
}
SMALL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--vocab-size", "100"),
]


@pytest.fixture
def fork(zygote, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """fork(script, *arguments) -> exit code, and output and errors together."""

    def call(script: Path, *arguments: str) -> tuple[int, str]:
        output = tmp_path / "output.txt"
        output.unlink(missing_ok=True)
        code = zygote.run(script, list(arguments), 1, {}, output)
        return code, output.read_text()

    return call


@pytest.fixture
def adacc(fork) -> Callable[..., tuple[int, str]]:
    """adacc(*arguments), in a fork that has imported Megatron."""
    return lambda *arguments: fork(ROOT / "megatron_adacc" / "cli.py", *arguments)


def test_1_5_billion_parameters(capsys):
    arguments = ["memory", "--params", "1.5e9", "--optimizer", "adam", "--precision", "fp16"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    (rank,) = content["stages"]
    assert content["parameters"] == 1_500_000_000
    assert rank["bytes"] == {
        "parameters": 3_000_000_000,
        "gradients": 3_000_000_000,
        "master": 6_000_000_000,
        "moments": 12_000_000_000,
    }
    assert (rank["total_bytes"], rank["bytes_per_parameter"]) == (24_000_000_000, 16)
    assert cli.main(arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["total", "24,000,000,000", "16", "22.35"] in rows
    assert ["parameters", "3,000,000,000", "2", "2.79"] in rows


@pytest.mark.parametrize(
    ("flags", "total"),
    [
        (["--precision", "fp16", "--world", "8", "--zero", "3"], 3_000_000_000),
        (["--precision", "fp16", "--world", "8"], 24_000_000_000),
        (["--precision", "fp16", "--accumulate-allreduce-grads-in-fp32"], 27_000_000_000),
        ([], 24_000_000_000),
    ],
)
def test_totals(flags, total, tmp_path):
    path = tmp_path / "memory.json"
    assert cli.main(["memory", "--params", "1500000000", *flags, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["stages"][0]["total_bytes"] == total


def test_nothing_heavy_is_imported_to_count_parameters():
    code = (
        "import sys; from megatron_adacc import cli; cli.main(['memory', '--params', '1e9']); "
        "print([name for name in ('torch', 'megatron', 'ortools') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give a model: --params N, or --config FILE and Megatron's flags (see adacc memory --help)."),
        (["--params", "-3"], "--params is -3, but it must be a whole number that is not negative."),
        (["--params", "1.5"], "--params is 1.5, but it must be a whole number that is not negative."),
        (["--params", "many"], "--params is 'many', but it must be a number."),
        (["--params", "nan"], "--params is nan, but it must be a whole number that is not negative."),
        (["--params", "0"], "0 parameters are given, but a model has at least one."),
        (
            ["--params", "1e9", "--optimizer", "adagrad"],
            "The optimizer is 'adagrad', but the known ones are adam, sgd.",
        ),
        (
            ["--params", "1e9", "--precision", "int8"],
            "The precision is 'int8', but the known ones are fp32, fp16, bf16.",
        ),
        (["--params", "1e9", "--zero", "4"], "The ZeRO stage is 4, but the stages are 0, 1, 2 and 3."),
        (["--params", "1e9", "--world", "0"], "--world is 0, but a job has at least one rank."),
        (["--params", "1e9", "--world", "-8"], "--world is -8, but it must be a whole number that is not negative."),
        (["--params", "1e9", "--world"], "argument --world: expected one argument (see adacc memory --help)."),
        (["--params", "1e9", "--config", "x.yaml"], "does not go with --config."),
        (["--params", "1e9", "--num-layers", "2"], "does not go with --num-layers."),
        (["--config", "absent.yaml"], "The config absent.yaml cannot be read: No such file or directory."),
        ([*SMALL, "--precision", "fp16"], "--precision goes with --params; a model's is said by Megatron's flags."),
        (
            [*SMALL, "--world", "3", "--tensor-model-parallel-size", "2"],
            "--world is 3, but the model is split over 2 ranks: give a multiple of 2.",
        ),
        (
            [*SMALL, "--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size is '0', but it must be a whole number of at least 1.",
        ),
        (["--json", "/absent/memory.json", "--config", "absent.yaml"], "/absent/memory.json cannot be written:"),
        ([*SMALL, "--device", "abacus"], "There is no device 'abacus' in the device table; there are v100-32gb"),
    ],
)
def test_sentences(arguments, sentence, capsys):
    assert cli.main(["memory", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("adacc memory: error: ")
    assert sentence in line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (SMALL[:-2], "The size of the vocabulary is not given: add --vocab-size, or --padded-vocab-size for the size"),
        ([*SMALL, "--num-experts", "4"], "--num-experts 4 is not in the memory model: leave it out."),
        ([*SMALL, "--pipeline-model-parallel-size", "3"], "Number of layers should be divisible"),
        ([*SMALL, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_sentences_of_a_model(arguments, sentence, adacc):
    code, text = adacc("memory", *arguments)
    assert code == 2
    assert sentence in text
    assert "Traceback" not in text


def test_a_pipeline(adacc):
    pipeline = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
    arguments = ["memory", *SMALL, *pipeline, "--global-batch-size", "4", "--world", "2"]
    code, text = adacc(*arguments, "--json", "-")
    assert code == 0, text
    first, last = json.loads(text[text.index("{") :])["stages"]
    assert (first["layers"], last["layers"]) == ([1, 1], [1, 1])
    assert (first["in_flight"], last["in_flight"]) == ([3, 2], [2, 1])
    # 4 layers of 12 h h + 13 h, two of them on each stage, the word embedding on both.
    layers, words = 2 * (12 * 32 * 32 + 13 * 32), 128 * 32
    assert first["parameters"] == layers + words + 16 * 32
    assert last["parameters"] == layers + words + 2 * 32
    # Only the last stage has a head between its forward and its backward.
    assert first["transient_bytes"] == 0
    assert last["outside_held_bytes"] == [0, 2 * 16 * 32 * 4 + 8 * 16 + 4 * 16 * 128 + 9 * 16]
    code, text = adacc(*arguments)
    assert "micro-batches in flight of its chunks" in text
    assert "Megatron's own estimate" in text


@pytest.mark.parametrize(
    ("flags", "layers", "per_parameter"),
    [
        (["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "1"], [[1], [3]], 16),
        (
            [
                *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Et|t|tt|L"),
                *("--global-batch-size", "2"),
            ],
            [[1, 2], [1, 0]],
            16,
        ),
        (["--bf16", "--grad-reduce-in-bf16"], [[4]], 16),
        (["--bf16", "--context-parallel-size", "2"], [[4]], 18),
        (["--fp16", "--accumulate-allreduce-grads-in-fp32"], [[4]], 18),
        (["--optimizer", "sgd", "--sgd-momentum", "0"], [[4]], 8),
        (
            [
                *(
                    "--use-torch-fsdp2",
                    "--world",
                    "4",
                    "--ckpt-format",
                    "torch_dcp",
                    "--no-gradient-accumulation-fusion",
                ),
                "--untie-embeddings-and-output-weights",
            ],
            [[4]],
            4,
        ),
    ],
)
def test_flags_that_need_a_gpu_are_read_without_one(flags, layers, per_parameter, adacc):
    code, text = adacc("memory", *SMALL, *flags, "--json", "-")
    assert code == 0, text
    stages = json.loads(text[text.index("{") :])["stages"]
    assert [stage["layers"] for stage in stages] == layers
    assert {stage["bytes_per_parameter"] for stage in stages} == {per_parameter}


def test_a_named_gpu_means_the_bytes_of_cuda(adacc, tmp_path):
    found = {}
    for name in ("cuda", "cpu", "V100-32GB"):
        code, text = adacc("memory", *SMALL, "--device", name, "--json", str(tmp_path / "memory.json"))
        assert code == 0, text
        found[name] = json.loads((tmp_path / "memory.json").read_text())
    assert found["V100-32GB"] == found["cuda"]
    assert found["cpu"]["stages"][0]["fixed_bytes"] > found["cuda"]["stages"][0]["fixed_bytes"]


def test_configs_against_megatron(fork):
    """Every config is parsed by Megatron, has the parameters that its comment says, and differs from Megatron's
    estimate by exactly the bytes that are explained."""
    calls = [f"{CONFIGS / name}.yaml,1" for name in COUNTS]
    calls.append(f"{CONFIGS / 'gpt_345m'}.yaml,8,--use-distributed-optimizer")
    code, text = fork(ROOT / "tests" / "megatron" / "memory_check_script.py", *calls)
    assert code == 0, text[-4000:]
    rows = json.loads(next(line for line in text.splitlines() if line.startswith("JSON")).removeprefix("JSON"))
    assert [row["parameters"] for row in rows] == [*COUNTS.values(), COUNTS["gpt_345m"]]
    for row in rows:
        assert row["static"] - row["megatron_static"] == sum(row["static_differences"].values())
        assert row["outside"] - row["megatron_outside"] == sum(row["outside_differences"].values())
    by_name = dict(zip(COUNTS, rows, strict=False))
    assert by_name["llama_7b"]["static"] == by_name["llama_7b"]["megatron_static"] == 18 * COUNTS["llama_7b"]
    assert by_name["gpt_345m"]["static"] == 16 * COUNTS["gpt_345m"]
    assert by_name["gpt_345m"]["megatron_static"] == 6_364_827_648
    for name in COUNTS:
        assert f"{COUNTS[name]:,}" in (CONFIGS / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", ["gpt_345m", "llama_7b"])
def test_a_config_is_traced(name, adacc):
    """Scaled down: flags given after the config's win."""
    code, text = adacc(
        *("trace", "--config", str(CONFIGS / f"{name}.yaml"), "--plan", "keep", "--json", "-"),
        *("--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4"),
        *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "2"),
    )
    assert code == 0, text[-4000:]
    content = json.loads(text[text.index("{") :])
    sizes = {row["dtype"] for row in content["rows"]}
    assert {"gpt_345m": "float16", "llama_7b": "bfloat16"}[name] in sizes
    assert content["totals"]["measured_bytes"] == content["totals"]["held_bytes"] > 0


def test_flags_of_a_config():
    flags = flags_of_file(str(CONFIGS / "llama_7b.yaml"))
    assert flags[flags.index("--ffn-hidden-size") + 1] == "11008"
    assert "--swiglu" in flags


def test_a_fine_tuning_of_65_billion_parameters_fits_48_gb(capsys):
    arguments = ["memory", "--params", "65e9", "--base", "nf4-double", "--lora-rank", "64"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    (rank,) = content["stages"]
    # arXiv 2305.14314: 4.127 bits a parameter; more than 780 GB for 16-bit fine-tuning, less than 48 GB for QLoRA.
    assert 8 * rank["base_bytes"] / 65e9 == pytest.approx(4.127, abs=5e-4)
    assert rank["base_bytes"] == pytest.approx(33.53e9, rel=1e-3)
    assert rank["full_training_bytes"] == 18 * 65_000_000_000
    # r 16 h a layer of 12 h^2, h = (102.4 / 12 * 65e9)^(1/3) = 8216: 4 r / 3 h of the parameters
    assert rank["trained_parameters"] == pytest.approx(4 * 64 / (3 * 8216) * 65e9, rel=1e-3)
    assert sum(rank["adapter_bytes"].values()) == 18 * rank["trained_parameters"]
    assert rank["total_bytes"] == rank["base_bytes"] + 18 * rank["trained_parameters"] < 48e9
    assert content["devices"]["a100-80gb"]["left_bytes"] > 0 > content["devices"]["a100-40gb"]["left_bytes"]
    assert cli.main(arguments) == 0
    lines = {
        line.strip().partition("  ")[0]: line.split()[-1]
        for line in capsys.readouterr().out.splitlines()
        if line.strip()
    }
    assert (lines["total"], lines["bits a parameter"]) == (f"{rank['total_bytes']:,}", "4.127")


def test_a_fine_tuning_of_a_model_counts_its_matrices(adacc, tmp_path):
    flags = [*SMALL, "--make-vocab-size-divisible-by", "64", "--transformer-impl", "local"]
    linears = 12 * 32 * 32
    outer = (128 + 16) * 32 + 2 * 32 + 4 * (4 * 32 + 96 + 32 + 128 + 32)  # embeddings, norms, biases
    path = tmp_path / "memory.json"
    found = {}
    for base in ("16bit", "nf4"):
        given = ["--adacc-lora-rank", "4", "--adacc-base", base, "--lora-targets", "linear_qkv,linear_fc2"]
        code, text = adacc("memory", *flags, *given, "--json", str(path))
        assert code == 0, text
        assert "\u2026" not in text  # no figure is cut
        (found[base],) = json.loads(path.read_text())["stages"]
    assert found["16bit"]["parameters"] == 4 * linears + outer
    assert found["16bit"]["base_bytes"] == 4 * found["16bit"]["parameters"]
    assert found["nf4"]["base_bytes"] == 4 * outer + 4 * linears * 4.5 / 8
    assert found["nf4"]["trained_parameters"] == 4 * 4 * ((32 + 96) + (128 + 32))
    assert sum(found["nf4"]["adapter_bytes"].values()) == 16 * found["nf4"]["trained_parameters"]
    assert found["nf4"]["layer_input_bytes"] == 4 * 4 * 16 * 32
    code, text = adacc("memory", *flags, "--lora-rank", "4", "--lora-targets", "wrong")
    assert code == 2
    assert "asked for 'wrong', but the layers have" in text
