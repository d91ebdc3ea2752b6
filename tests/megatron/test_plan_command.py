"""adacc plan: a job on a GPU that is not there, beside what others do; and its plan files in runs."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_adacc import cli
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import plan_table
from megatron_adacc.megatron.plan_notes import check_notes, check_plan, notes_of
from megatron_adacc.planner import Compress, LayerPlan, Plan

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MIB, GIB = 2**20, 2**30
DEVICE = ["--device", "v100-32gb"]
SMALL = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--micro-batch-size", "2", "--vocab-size", "127", "--transformer-impl", "local", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-create-attention-mask-in-dataloader"),
]
STRATEGIES = ["none", "full", "selective", "quantized", "auto"]


def plan(capsys: pytest.CaptureFixture, *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", *DEVICE, *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    printed = capsys.readouterr()
    (sentence,) = printed.err.splitlines()
    return sentence


class TestConfigs:
    def test_gpt_345m(self, capsys: pytest.CaptureFixture) -> None:
        content = plan(capsys, "--config", str(CONFIGS / "gpt_345m.yaml"), "--micro-batch", "8", "--limit", "20GiB")
        found = content["strategies"]
        assert list(found) == STRATEGIES
        assert [found[name]["fits"] for name in STRATEGIES] == [False, True, True, True, True]
        # s b h (34 + 5 a s / h) and the statistics of two norms and a causal mask, see docs/offline.md.
        assert found["none"]["held_bytes"] == 24 * 957_480_960
        (stage,) = content["stages"]
        (first, *_) = stage["classes"]
        assert round(sum(site["bytes"] for site in first["sites"]) / MIB, 1) == 913.1
        # Without scores, softmax and dropout of the attention 34 s b h are left (arXiv 2205.05198).
        assert found["selective"]["held_bytes"] == 24 * (34 * 1024 * 8 * 1024 + 4 * 1024 * 8 * 4)
        assert found["full"]["held_bytes"] == 24 * 2 * 1024 * 8 * 1024
        assert found["auto"]["held_bytes"] < found["none"]["held_bytes"]
        assert 19.9 * GIB < found["auto"]["peak_bytes"] <= 20 * GIB
        times = {name: found[name]["step_ms"] / found["none"]["step_ms"] for name in STRATEGIES}
        assert times["none"] == 1 < times["auto"] < times["selective"] < times["full"]
        assert times["full"] == pytest.approx(1.33, abs=0.02)
        assert found["none"]["samples_per_second"] == pytest.approx(8e3 / found["none"]["step_ms"])
        # All activations are 75 to 80 % of what the device uses: those of the layers, and the loss head's.
        outside = 4 * 1024 * 8 * 50304 + 2 * 2 * 1024 * 8 * 1024
        share = (found["none"]["held_bytes"] + outside) / found["none"]["peak_bytes"]
        assert 0.75 < share < 0.80

    def test_a_small_batch_needs_nothing(self, capsys: pytest.CaptureFixture) -> None:
        content = plan(capsys, "--config", str(CONFIGS / "gpt_117m.yaml"))
        found = content["strategies"]
        assert {name: found[name]["fits"] for name in STRATEGIES} == dict.fromkeys(STRATEGIES, True)
        assert found["auto"] == found["none"]
        actions = {site["action"] for group in content["stages"][0]["classes"] for site in group["sites"]}
        assert actions == {"keep"}
        assert content["limit_bytes"] == int(0.95 * content["memory_bytes"])

    def test_what_does_not_fit_is_shown_all_the_same(self, capsys: pytest.CaptureFixture) -> None:
        assert cli.main(["plan", *DEVICE, "--config", str(CONFIGS / "gpt_4_7b.yaml")]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        rows = {line[0]: line for line in lines if line and line[0] in STRATEGIES}
        assert list(rows) == STRATEGIES
        for row in rows.values():
            assert row[-5:] == ["no,", "82.6", "GiB", "too", "much"]
            assert float(row[-6]) > 1  # samples/s
        assert any(line[:4] == ["No", "plan", "fits", "into"] for line in lines)

    def test_tensor_parallel_ranks_share(self, capsys: pytest.CaptureFixture) -> None:
        split = ["--tensor-model-parallel-size", "8"]
        content = plan(capsys, "--config", str(CONFIGS / "gpt_4_7b.yaml"), *split)
        assert all(content["strategies"][name]["fits"] for name in STRATEGIES)


class TestTable:
    def test_one_stage(self, capsys: pytest.CaptureFixture) -> None:
        assert cli.main(["plan", *DEVICE, *SMALL, "--limit", "20%"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(
            "Predicted on NVIDIA Tesla V100 SXM2 32 GB: micro-batch 2, 1 of them a step; limit 20 %"
        )
        assert [line.split()[0] for line in lines[4:9]] == STRATEGIES
        (softmax,) = [
            line.split() for line in lines if line.strip().startswith("self_attention") and "/_softmax.0" in line
        ]
        assert softmax[1:3] == ["128.0", "KiB"]  # 2 x 4 x 64 x 64 in fp32
        assert "recompute" in softmax
        assert any(line.startswith("optimal, solved in ") for line in lines)

    def test_bytes_stay_beside_their_unit(self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        site = {"site": "s" * 64, "bytes": 2**27, "action": "compress:bitmask[]", "held_bytes": 2**24, "shared": False}
        groups = [{"module": "layer", "layers": [[n, n]], "sites": [site]} for n in range(3)]
        monkeypatch.setattr(plan_table, "actions_data", lambda plan: groups)
        monkeypatch.delenv("COLUMNS", raising=False)
        plan_table._actions(plan_table.console(), None, "title")  # type: ignore[arg-type]
        assert any(line.count("bitmask 16.0 MiB") == 3 for line in capsys.readouterr().out.splitlines())
        monkeypatch.setenv("COLUMNS", "125")
        plan_table._actions(plan_table.console(), None, "title")  # type: ignore[arg-type]
        lines = capsys.readouterr().out.splitlines()
        (first,) = [number for number, line in enumerate(lines) if line.strip().startswith("sss")]
        assert lines[first].split()[3:] == ["bitmask"] * 3
        assert lines[first + 1].split() == ["16.0", "MiB"] * 3

    def test_stages_differ_in_what_is_in_flight(self, capsys: pytest.CaptureFixture) -> None:
        pipeline = ["--pipeline-model-parallel-size", "4", "--global-batch-size", "16"]
        content = plan(capsys, *SMALL, *pipeline, "--limit", "50%")
        peaks = [stage["strategies"]["none"]["peak_bytes"] for stage in content["stages"]]
        held = [stage["strategies"]["none"]["held_bytes"] for stage in content["stages"]]
        assert [stage["layers"] for stage in content["stages"]] == [1, 1, 1, 1]
        assert len(set(held[:2])) == 1
        assert peaks[1] - peaks[2] == held[1]  # one micro-batch more: 3 and 2
        one = [stage["strategies"]["none"]["micro_batch_us"] for stage in content["stages"]]
        step_us = 1e3 * content["strategies"]["none"]["step_ms"]
        least = 8 * max(one) + sum(one) - max(one)
        assert least < step_us < 1.5 * least  # the optimizer's step comes to it

    def test_a_lossy_plan_is_a_row_of_its_own(self, capsys: pytest.CaptureFixture) -> None:
        config = ["--config", str(CONFIGS / "gpt_345m.yaml")]
        content = plan(capsys, *config, "--limit", "12GiB", "--error-budget", "0.02")
        assert list(content["strategies"]) == [*STRATEGIES, "auto lossy"]
        assert content["chosen"] == "auto lossy"
        assert 0 < content["stages"][0]["solver"]["error"] <= 0.02
        found = content["strategies"]
        assert found["auto lossy"]["step_ms"] < found["auto"]["step_ms"]
        actions = [site["action"] for group in content["stages"][0]["classes"] for site in group["sites"]]
        assert any(action.startswith("compress:outlier_int") for action in actions)
        assert "compress:bitmask" in actions


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (SMALL, "--device is missing: give one of v100-32gb"),
            ([*SMALL, "--device", "abacus"], "There is no device 'abacus' in the device table; there are v100-32gb"),
            ([*SMALL, *DEVICE, "--limit", "30"], "a unit is missing; give bytes with a unit"),
            ([*SMALL, *DEVICE, "--limit", "30parsec"], "The limit '30parsec' has an unknown unit"),
            ([*SMALL, *DEVICE, "--micro-batch", "0"], "--micro-batch is '0', but it must be a whole number"),
            ([*SMALL, *DEVICE, "--world", "3", "--tensor-model-parallel-size", "2"], "give a multiple of 2"),
            ([*SMALL, *DEVICE, "--error-budget", "-1"], "--error-budget is -1, but an error is a number from 0 up"),
            ([*SMALL, *DEVICE, "-o", "/nowhere/plan.json"], "its folder does not exist"),
            ([*SMALL, *DEVICE, "-o", "-"], "- stands for standard output, which takes JSON alone"),
            ([*SMALL, *DEVICE, "--bogus"], "unrecognized arguments: --bogus"),
            ([*DEVICE, "--config", "/nowhere.yaml"], "The config /nowhere.yaml cannot be read"),
        ],
    )
    def test_a_sentence(self, capsys: pytest.CaptureFixture, arguments: list[str], words: str) -> None:
        sentence = refused(capsys, "plan", *arguments)
        assert sentence.startswith("adacc plan: error: ")
        assert words in sentence

    def test_the_least_limit_is_said_and_works(self, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        sentence = refused(capsys, "plan", *DEVICE, *SMALL, "--limit", "1%", "-o", str(path))
        assert not path.exists()
        least = sentence.partition("the least limit that works is ")[2].split()[0]
        assert least.endswith("%")
        content = plan(capsys, *SMALL, "--limit", least)
        assert content["refusal"] is None
        below = f"{float(least[:-1]) - 0.02:.2f}%"
        assert cli.main(["plan", *DEVICE, *SMALL, "--limit", below]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("adacc plan: error: No plan fits into")
        assert "No plan fits into" not in printed.out
        assert "The plan shown is the one of the least memory." in printed.out.splitlines()


ARGS: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_query_groups": None,
    "group_query_attention": False, "kv_channels": 16, "normalization": "LayerNorm", "seq_length": 64,
    "micro_batch_size": 2, "fp16": True, "bf16": False, "tensor_model_parallel_size": 1, "sequence_parallel": False,
    "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "context_parallel_size": 1,
}  # fmt: skip


class TestNotes:
    @pytest.mark.parametrize(
        ("other", "words"),
        [
            ({"num_layers": 6}, "was made for num-layers 4, but this run has 6"),
            ({"hidden_size": 128, "seq_length": 32}, "was made for hidden-size 64, but this run has 128"),
            ({"group_query_attention": True, "num_query_groups": 2}, "made for num-query-groups 4, but this run has 2"),
            ({"seq_length": 32}, "was made for seq-length 64, but this run has 32"),
            ({"micro_batch_size": 4}, "was made for micro-batch-size 2, but this run has 4"),
            ({"fp16": False, "bf16": True}, "was made for precision fp16, but this run has bf16"),
            ({"tensor_model_parallel_size": 2}, "made for tensor-model-parallel-size 1, but this run has 2"),
            ({"pipeline_model_parallel_size": 4}, "made for pipeline-model-parallel-size 1, but this run has 4"),
        ],
    )
    def test_the_first_difference_is_named(self, other: dict[str, Any], words: str) -> None:
        made = Plan((), notes=notes_of(Namespace(**ARGS), "v100-32gb"))
        check_notes(made, "p.json", Namespace(**ARGS))
        with pytest.raises(UserError, match=words):
            check_notes(made, "p.json", Namespace(**{**ARGS, **other}))

    def test_another_version(self) -> None:
        made = Plan((), notes=(*notes_of(Namespace(**ARGS), "v100-32gb")[:-2], ("megatron-adacc", "0.0.9")))
        with pytest.raises(UserError, match=r"was made by megatron-adacc 0\.0\.9, and this is "):
            check_notes(made, "p.json", Namespace(**ARGS))

    @pytest.mark.parametrize(
        ("action", "words"),
        [
            (Compress("int3"), "There is no codec 'int3'; there are bitmask, outlier_int4"),
            (Compress("group_int4", (("colour", 1),)), "Codec 'group_int4' has no option 'colour'"),
        ],
    )
    def test_an_unknown_codec(self, action: Compress, words: str) -> None:
        made = Plan((LayerPlan("0123", (("site", action),)),))
        with pytest.raises(UserError, match=f"The plan file p.json cannot be used: {words}"):
            check_plan(made, "p.json", Namespace(**ARGS))

    def test_a_plan_without_notes_fits_everywhere(self) -> None:
        check_notes(Plan(()), "p.json", Namespace(**ARGS))


JOB = {
    "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "max_position_embeddings": 64,
    "hidden_dropout": 0, "attention_dropout": 0, "transformer_impl": "local", "no_bias_gelu_fusion": True,
    "no_bias_dropout_fusion": True, "no_masked_softmax_fusion": True,
}  # fmt: skip


def planned(tmp_path: Path, capsys: pytest.CaptureFixture, *layout: str) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "plan.json"
    flags = [part for name, value in JOB.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags = [flag for flag in flags if flag != "True"]
    flags += ["--micro-batch-size", "2", "--global-batch-size", "4", "--vocab-size", "127", *layout]
    content = plan(capsys, *flags, "--limit", "35%", "-o", str(path))
    return path, content


class TestPlanFile:
    def test_a_run_holds_what_was_predicted(self, trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        path, content = planned(tmp_path, capsys)
        off, run = trained(**JOB), trained(plan=path, **JOB)
        assert run.losses == off.losses
        held = [one.report["iterations"][-1]["held_bytes"] for one in (off, run)]
        found = content["strategies"]
        assert held[0] - held[1] == found["none"]["held_bytes"] - found["auto"]["held_bytes"] > 0

    def test_another_job_is_refused(self, train, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        path, _ = planned(tmp_path, capsys)
        run = train(plan=path, **{**JOB, "seq_length": 32})
        assert run.code == 2
        assert "was made for seq-length 64, but this run has 32" in run.sentence()

    @pytest.mark.distributed
    def test_one_file_serves_all_stages(self, trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        path, _ = planned(tmp_path, capsys, "--pipeline-model-parallel-size", "2")
        file = Plan.load(path)
        assert {layer.stage for layer in file.layers} == {0, 1}
        assert {layer.stage for layer in file.of_stage(1).layers} == {1}
        layout = {**JOB, "ranks": 2, "pipeline_model_parallel_size": 2}
        off, run = trained(**layout), trained(plan=path, **layout)
        assert run.losses == off.losses
        held = [sum(one.report["layer_held_bytes"].values()) for one in (off, run)]
        assert held[1] < 0.6 * held[0]
