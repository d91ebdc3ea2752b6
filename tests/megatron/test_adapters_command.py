"""adacc adapters export: models of Hugging Face beside the Megatron models that were trained, merging, layouts."""

import contextlib
import json
from argparse import Namespace

import pytest
import torch
from megatron_models import MODELS
from torch import nn

from megatron_adacc import adapters
from megatron_adacc.cli import main
from megatron_adacc.megatron import checkpoint_files
from megatron_adacc.patches import patching

RANK, ALPHA = 4, 6.0
COMMON = {"make_vocab_size_divisible_by": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0, "report": False}
# The learning rate that adapters are trained with, so that they make a difference that can be seen.
LARGE = {"lr": 0.1, "adacc_lora_rank": RANK, "adacc_lora_alpha": ALPHA, "weight_decay": 0.0}
PIPELINE = {"ranks": 2, "pipeline_model_parallel_size": 2}
TENSOR = {"ranks": 2, "tensor_model_parallel_size": 2}
# For each model: its format, and how the jobs of base, adapters and evaluation are laid out.
CASES = {"gpt": ("torch_dist", {}, PIPELINE, {}), "llama": ("torch", TENSOR, TENSOR, TENSOR)}
CONTEXTS = ("5 9 11 2", "7 7", "100 3 50 60 70 80 90", "1 2 3 4 5 6 7 8 9 10 11 12 13 14", "64 32 16")
CHOICES = ("1", "17", "99", "126")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture
def trained_once(folder, train):
    """trained_once(model): the folders of a base and of adapters beside it, and a task."""

    def made(model):
        base, beside = folder / f"{model}-base", folder / f"{model}-adapters"
        kind, base_layout, layout, _ = CASES[model]
        settings = {**COMMON, **MODELS[model], "ckpt_format": kind}
        if not beside.exists():
            for given in (
                {"save": base, "save_interval": 2, **base_layout},
                {"pretrained_checkpoint": base, "save": beside, "save_interval": 2, **LARGE, **layout},
            ):
                run = train(iterations=2, **settings, **given)
                assert run.code == 0, run.text[-4000:]
        return base, beside, settings

    return made


@pytest.fixture
def scores(folder, train, jobs, tmp_path):
    """scores(settings, ...): the log-probabilities that a job of adacc evaluate gives to every choice."""
    task = folder / "task.jsonl"
    lines = [{"context": context, "target": f" {choice}"} for context in CONTEXTS for choice in CHOICES]
    task.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def run(settings, **given):
        result = tmp_path / "result.json"
        done = train(
            script=jobs.ROOT / "megatron_adacc" / "megatron" / "evaluate_job.py", plan=None, task=task, result=result,
            no_load_optim=True, no_load_rng=True, skip_train=True, exit_on_missing_checkpoint=True, **settings, **given,
        )  # fmt: skip
        assert done.code == 0, done.text[-4000:]
        return torch.tensor([one["log_probability"] for one in json.loads(result.read_text())["details"]])

    return run


def of_transformers(model):
    """The same of a model of transformers."""
    found = []
    for context in CONTEXTS:
        tokens = torch.tensor([[int(word) for word in context.split()]])
        with torch.no_grad():
            logits = model.eval()(tokens).logits[0, -1, :127].double()
        found += [logits.log_softmax(-1)[int(choice)] for choice in CHOICES]
    return torch.stack(found).float()


@pytest.mark.distributed
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_peft_and_transformers_compute_what_megatron_does(model, trained_once, scores, tmp_path):
    import peft
    import transformers

    base, beside, settings = trained_once(model)
    layout = CASES[model][3]
    adapted = scores({**settings, **layout}, load=beside, base=base)
    for arguments in (
        ["--checkpoint", beside, "-o", tmp_path / "peft"],
        ["--base", base, "--format", "huggingface", "-o", tmp_path / "base"],
        ["--checkpoint", beside, "--merged", "--format", "huggingface", "-o", tmp_path / "merged"],
        ["--checkpoint", beside, "--base", base, "--merged", "-o", tmp_path / "megatron"],
    ):
        assert main(["adapters", "export", *map(str, arguments)]) == 0
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    without = of_transformers(alone)
    assert (without - adapted).abs().max() > 0.1
    beside_base = of_transformers(peft.PeftModel.from_pretrained(alone, tmp_path / "peft"))
    torch.testing.assert_close(beside_base, adapted, rtol=0, atol=2e-5)
    merged = of_transformers(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, adapted, rtol=0, atol=2e-5)

    before, after = (checkpoint_files.whole_model(checkpoint_files.find(str(f))) for f in (base, tmp_path / "megatron"))
    matrices = checkpoint_files.whole_model(checkpoint_files.find(str(beside)), lambda name: "lora_" in name)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name.replace("lora_a", "weight") for name in matrices if "lora_a" in name}
    for name in changed:
        a, b = (matrices[name.replace("weight", f"lora_{letter}")] for letter in "ab")
        expected = before[name].double() + ALPHA / RANK * b.double() @ a.double()
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-6, atol=1e-7)
    if model == "gpt":  # Megatron itself finds the names and shapes of format torch, which were compared
        again = scores(settings, load=tmp_path / "megatron")
        torch.testing.assert_close(again, adapted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("base", ["16bit", "nf4-double"])
def test_merging_is_the_modules_own_to_the_bit(base):
    """Beside a base of fewer bits, it is what two tensor-parallel ranks used, each its half of the columns."""
    from megatron_adacc.megatron.checkpoint_merge import Adapters

    name = "decoder.layers.0.mlp.linear_fc2"
    layer = nn.ModuleDict({"decoder": nn.Linear(24, 40, dtype=torch.bfloat16)})
    before = layer["decoder"].weight.detach().clone()
    used = before
    if base != "16bit":
        halves = (nn.ModuleDict({"decoder": nn.Linear(12, 40, dtype=torch.bfloat16)}) for _ in range(2))
        dense = []
        for half, weight in zip(halves, before.chunk(2, dim=1), strict=True):
            half["decoder"].weight.data.copy_(weight)
            (quantized,) = adapters.quantize_base(half, ["decoder"], base).values()
            dense.append(quantized.dense())
        used = torch.cat(dense, dim=1)
        layer["decoder"].weight.data.copy_(used)
    adapters.inject(layer, ["decoder"], rank=RANK, alpha=ALPHA)
    with torch.no_grad():
        layer["decoder"].lora_b.normal_()
    state = {key.replace("decoder", name): matrix for key, matrix in adapters.adapter_state(layer).items()}
    adapters.merge(layer)
    args = Namespace(
        adacc_lora_rank=RANK, adacc_lora_alpha=ALPHA, adacc_base=base, tensor_model_parallel_size=2,
        params_dtype=torch.bfloat16, swiglu=False,
    )  # fmt: skip
    found = Adapters(state, args)
    assert torch.equal(found.merge(f"{name}.weight", before), layer["decoder"].weight)
    assert not torch.equal(used, layer["decoder"].weight)
    # As a rank has it, in a file of its own.
    half = found.merge(f"{name}.weight", before[:, 12:], (40, 24), lambda delta: delta[:, 12:])
    assert torch.equal(half, layer["decoder"].weight[:, 12:])
    other = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(found.merge(other, before), before) is (base == "16bit")
    assert torch.equal(found.merge("output_layer.weight", before), before)
    found.check_all_merged()


@pytest.mark.parametrize("gated", [True, False])
def test_parts_of_ranks_and_stages_are_joined(gated, tmp_path):
    """Files of format torch as 2 x 2 ranks with two chunks each write them, cut from whole tensors."""
    shapes = {
        "self_attention.linear_qkv.lora_b": (12, 2),
        "mlp.linear_fc1.weight": (16, 6),
        "mlp.linear_fc2.lora_a": (2, 8),
        "mlp.linear_fc2.bias": (6,),
        "mlp.linear_fc1.layer_norm_weight": (6,),
    }
    whole = {f"decoder.layers.{n}.{path}": torch.randn(shape) for n in range(8) for path, shape in shapes.items()}
    whole["embedding.word_embeddings.weight"] = torch.randn(10, 6)
    args = Namespace(swiglu=gated, untie_embeddings_and_output_weights=False)
    for rank in range(2):
        for stage in range(2):
            state = {"args": args}
            for chunk in range(2):
                first = 2 * (2 * chunk + stage)
                model = {
                    f"decoder.layers.{n}.{path}": whole[f"decoder.layers.{first + n}.{path}"]
                    for n in range(2)
                    for path in shapes
                }
                if (chunk, stage) == (0, 0):
                    model["embedding.word_embeddings.weight"] = whole["embedding.word_embeddings.weight"]
                if (chunk, stage) == (1, 1):
                    model["output_layer.weight"] = whole["embedding.word_embeddings.weight"]
                state[f"model{chunk}"] = {
                    name: checkpoint_files.part_of(name, tensor, rank, 2, gated).clone()
                    for name, tensor in model.items()
                }
            path = tmp_path / "iter_0000007" / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save(state, path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    files = checkpoint_files.find(str(tmp_path))
    found = checkpoint_files.whole_model(files)
    expected = {checkpoint_files.own_name(name): tensor for name, tensor in whole.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    part = torch.load(tmp_path / "iter_0000007/mp_rank_01_000/model_optim_rng.pt", weights_only=False)["model0"]
    # The second rank's rows: its part of both halves, or the second half.
    rows = [4, 5, 6, 7, 12, 13, 14, 15] if gated else list(range(8, 16))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(part[name], whole[name][rows])


class TestRefusals:
    @pytest.fixture
    def refused(self, capsys, monkeypatch):
        """refused(arguments): the sentence that the command ends with. What it patched is taken back: a process that
        exports ends with that, and this one has other tests to run."""
        applied: list[contextlib.ExitStack] = []
        apply = patching.apply
        monkeypatch.setattr(patching, "apply", lambda patches: applied.append(apply(patches)) or applied[-1])

        def run(*arguments):
            assert main(["adapters", "export", *map(str, arguments)]) == 2
            return capsys.readouterr().err

        yield run
        for stack in reversed(applied):
            stack.close()

    def test_options(self, refused, tmp_path):
        out = ("-o", tmp_path / "out")
        assert "--checkpoint is missing" in refused(*out)
        assert "--merged makes a whole model" in refused("--checkpoint", "c", "--merged", "--format", "peft", *out)
        assert "add --merged" in refused("--checkpoint", "c", "--format", "huggingface", *out)
        assert "--base is not read" in refused("--checkpoint", "c", "--base", "b", *out)
        assert "--base-name goes with" in refused("--checkpoint", "c", "--merged", "--base-name", "b", *out)
        assert "is there already" in refused("--checkpoint", "c", "-o", tmp_path.parent)
        assert "its folder does not exist" in refused("--checkpoint", "c", "-o", tmp_path / "no" / "out")
        assert "has no checkpoint" in refused("--checkpoint", tmp_path, *out)
        assert not (tmp_path / "out").exists()

    def test_models_without_a_counterpart(self):
        from megatron_adacc.megatron.hugging_face import family_of

        plain = Namespace(
            num_attention_heads=4, kv_channels=8, hidden_size=32, group_query_attention=False, swiglu=False,
            normalization="LayerNorm", position_embedding_type="learned_absolute", add_bias_linear=True,
        )  # fmt: skip
        assert family_of(plain).name == "gpt2"
        for change, words in (
            ({"swiglu": True}, "and SwiGLU"),
            ({"add_bias_linear": False}, "LayerNorm and no SwiGLU"),
            ({"rotary_interleaved": True}, "--rotary-interleaved"),
            ({"quick_geglu": True}, "--quick-geglu True"),
            ({"num_experts": 8}, "--num-experts 8"),
        ):
            with pytest.raises(ValueError, match=words):
                family_of(Namespace(**{**vars(plain), **change}))
