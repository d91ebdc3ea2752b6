"""adacc evaluate: tasks, scores beside a model written out by hand, ranks."""

import json
import math

import pytest
import torch
from torch.nn import functional

from megatron_adacc.cli import main
from megatron_adacc.megatron.evaluate_command import job_flags
from megatron_adacc.megatron.evaluate_task import Example, Score, read, sequences, summarize

HIDDEN, HEADS, VOCABULARY = 32, 4, 127


def words(text):
    """A tokenizer: a token a letter, but "qu" is one."""
    return [ord(c) for c in text.replace("qu", "Q")]


def written(tmp_path, *lines):
    path = tmp_path / "task.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def test_the_last_word_is_the_target(tmp_path):
    path = written(tmp_path, {"text": "He said: go home  "}, {"context": "a", "target": "b"})
    assert read(path) == [Example(1, "He said: go", (" home",)), Example(2, "a", ("b",))]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"text": "word"}, "at least two words"),
        ({"context": "", "target": "x"}, "must be"),
        ({"context": "x", "choices": ["a"], "answer": 0}, "two choices"),
        ({"context": "x", "choices": ["a", "b"], "answer": 2}, "two choices"),
        ([], "must be"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, capsys, line, sentence):
    path = written(tmp_path, {"text": "a b"}, line)
    assert main(["evaluate", "--task", path, "--checkpoint", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"Line 2 of {path}" in error
    assert sentence in error


def test_tokens_over_the_border_are_tokenized_apart():
    examples = [Example(1, "abcq", ("u",)), Example(2, "abcdef", ("gh",))]
    border, long = sequences(examples, words, 4)
    assert border.tokens == (*words("abcq"), ord("u"))
    assert (long.tokens, long.scored, long.truncated) == (tuple(words("defgh")), 2, True)


def test_a_target_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="at most 2 "):
        sequences([Example(7, "a", ("bcd",))], words, 2)


def test_figures():
    examples = [Example(1, "a", ("b",)), Example(2, "a", ("bc",)), Example(3, "a", ("b", "cd"), 1)]
    asked = sequences(examples, words, 9)
    scores = [Score(0, 0, -1.0, True), Score(1, 0, -2.0, False), Score(2, 0, -4.0, True), Score(2, 1, -3.0, False)]
    found = summarize(examples, asked, scores)
    assert (found["accuracy"], found["target_tokens"]) == (pytest.approx(2 / 3), 5)
    assert found["accuracy_se"] == pytest.approx(math.sqrt(2 / 27))
    assert found["perplexity"] == pytest.approx(math.exp(2))
    assert found["token_perplexity"] == pytest.approx(math.exp(6 / 5))
    assert [one["correct"] for one in found["details"]] == [True, False, True]
    with pytest.raises(ValueError, match="line 3"):
        summarize(examples, asked, scores[:3])


def test_flags_of_ours_are_not_repeated():
    flags = job_flags(["--micro-batch-size", "2", "--num-layers=2"], "DIR")
    assert flags.count("--micro-batch-size") == 1
    assert flags[-2:] == ["--load", "DIR"]
    with pytest.raises(ValueError, match="--load is what --checkpoint says"):
        job_flags(["--load=x"], "DIR")
    with pytest.raises(ValueError, match="--pretrained-checkpoint is what --base says"):
        job_flags(["--pretrained-checkpoint", "x"], "DIR")


def test_the_base_of_adapters_must_be_there(tmp_path, capsys):
    task = written(tmp_path, {"text": "a b"})
    given = ["evaluate", "--task", task, "--checkpoint", str(tmp_path)]
    assert main([*given, "--base", str(tmp_path / "absent")]) == 2
    assert f"--base {tmp_path / 'absent'} is no folder" in capsys.readouterr().err


def by_hand(state, tokens):
    """Logarithms of the probabilities (sequence, vocabulary) that a GPT of Megatron's local layers gives."""
    count = len(tokens)
    x = state["embedding.word_embeddings.weight"][tokens] + state["embedding.position_embeddings.weight"][:count]

    def linear(name, value):
        return value @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name, value):
        return functional.layer_norm(value, (HIDDEN,), state[f"{name}.weight"], state[f"{name}.bias"])

    for number in (0, 1):
        at = f"decoder.layers.{number}"
        mixed = linear(f"{at}.self_attention.linear_qkv", norm(f"{at}.input_layernorm", x))
        query, key, value = mixed.view(count, HEADS, 3, HIDDEN // HEADS).permute(2, 1, 0, 3)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(f"{at}.self_attention.linear_proj", attended.transpose(0, 1).reshape(count, HIDDEN))
        inner = functional.gelu(linear(f"{at}.mlp.linear_fc1", norm(f"{at}.pre_mlp_layernorm", x)), approximate="tanh")
        x = x + linear(f"{at}.mlp.linear_fc2", inner)
    logits = norm("decoder.final_layernorm", x) @ state["embedding.word_embeddings.weight"][:VOCABULARY].T
    return torch.log_softmax(logits, dim=-1)


CONTEXTS = ("5 9 11 2", "7 7", "100 3 50 60 70 80 90", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", "64 32 16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture
def trained_once(checkpoint, trained):
    """A folder with a checkpoint, its weights, and a task with as many right targets as wrong ones."""
    folder = checkpoint / "c"
    if not folder.exists():
        trained(iterations=2, save=folder, save_interval=2, ckpt_format="torch", report=False)
    (path,) = folder.rglob("model_optim_rng.pt")
    state = {k: v.float() for k, v in torch.load(path, weights_only=False)["model"].items() if torch.is_tensor(v)}
    lines, expected = [], []
    for number, context in enumerate(CONTEXTS):
        predicted = by_hand(state, [int(word) for word in context.split()])[-1]
        best = int(predicted.argmax())
        target = best if number % 2 == 0 else (best + 1) % 127
        lines.append({"text": f"{context} {target}"})
        expected.append(float(predicted[target]))
    return folder, written(checkpoint, *lines), expected


@pytest.mark.parametrize(
    ("ranks", "split"),
    [(2, {}), (2, {"tensor_model_parallel_size": 2}), (2, {"pipeline_model_parallel_size": 2})],
    ids=["data-parallel", "tensor-parallel", "pipeline-parallel"],
)
def test_scores_are_those_of_the_model(trained_once, train, jobs, tmp_path, ranks, split):
    folder, task, expected = trained_once
    result = tmp_path / "result.json"
    if split:
        folder = resplit(folder, train)
    run = train(
        script=jobs.ROOT / "megatron_adacc" / "megatron" / "evaluate_job.py", plan=None, report=False, ranks=ranks,
        task=task, result=result, load=folder, no_load_optim=True, no_load_rng=True, skip_train=True,
        exit_on_missing_checkpoint=True, **split,
    )  # fmt: skip
    assert run.code == 0, run.text[-4000:]
    found = json.loads(result.read_text())
    assert [one["log_probability"] for one in found["details"]] == pytest.approx(expected, abs=2e-4)
    assert [one["correct"] for one in found["details"]] == [True, False, True, False, True]
    assert found["accuracy"] == 0.6
    assert found["perplexity"] == pytest.approx(math.exp(-sum(expected) / 5), rel=1e-3)


def resplit(folder, train):
    """The same weights in the format that any number of ranks reads."""
    new = folder.parent / "dist"
    if new.exists():
        return new
    run = train(
        iterations=3, load=folder, finetune=True, no_load_optim=True, no_load_rng=True, lr=0.0, save=new,
        save_interval=3, ckpt_format="torch_dist", weight_decay=0.0, report=False,
    )  # fmt: skip
    assert run.code == 0, run.text[-4000:]
    return new


def test_the_command(trained_once, jobs, tmp_path, capfd):
    folder, task, expected = trained_once
    flags = jobs.flags({name: value for name, value in jobs.MODEL.items() if "interval" not in name})
    given = ["evaluate", "--task", task, "--checkpoint", str(folder), *flags, "--mock-data"]
    assert main([*given, "--json", str(tmp_path / "r.json")]) == 0
    assert "60.00%" in capfd.readouterr().out
    content = json.loads((tmp_path / "r.json").read_text())
    assert (content["examples"], content["iteration"]) == (5, 2)
    assert [one["log_probability"] for one in content["details"]] == pytest.approx(expected, abs=2e-4)
    assert content["perplexity"] == pytest.approx(math.exp(-sum(expected) / 5), rel=1e-3)
