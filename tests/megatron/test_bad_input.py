"""A user's mistake: one sentence, a non-zero exit, no traceback, nothing left behind."""

import os
import signal
import socket
import time

import psutil
import pytest


def check_sentence(run, *, program="pretrain_gpt.py", code=2):
    assert run.code == code, run.text[-4000:]
    assert "Traceback" not in run.text
    return run.sentence(program)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"plan": "ful"}, "--adacc-plan is 'ful', but the known plans are off, full, selective"),
        (
            {"plan": "full", "recompute_granularity": "full"},
            "--adacc-plan full decides what is recomputed, and so does --recompute-granularity",
        ),
        ({"adacc_device": "cuda"}, "--adacc-device cuda asks for a GPU, but"),
        ({"adacc_device": "tpu"}, "--adacc-device is 'tpu', but the known devices are cpu, cuda"),
        ({"num_attention_heads": 3}, "Megatron refuses these arguments"),
        ({"tensor_model_parallel_size": 2}, "world size (1) is not divisible"),
        ({"data_path": "nowhere/text"}, "nowhere/text.bin and nowhere/text.idx are missing"),
        ({"padded_vocab_size": 64}, "The tokenizer has 127 entries, but the model's vocabulary has 64"),
        ({"no_such_flag": 1}, "unrecognized arguments: --no-such-flag 1"),
        ({"sft": True}, "--sft is a job of upstream's own script"),
        ({"fp8_format": "hybrid"}, "--fp8-format needs a GPU"),
        ({"yaml_cfg": "nowhere.yaml"}, "nowhere.yaml cannot be read"),
        ({"num_layers": 0}, "Megatron refuses these arguments"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_mistake_is_a_sentence(train, settings, words):
    if words.startswith("--adacc-device cuda") and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU here")
    assert words in check_sentence(train(**settings))


@pytest.mark.distributed
def test_tensor_parallel_size_that_does_not_divide_the_heads_is_said_once(train):
    run = train(ranks=2, num_attention_heads=1, tensor_model_parallel_size=2)
    assert run.code != 0
    assert "Megatron refuses these arguments: num_attention_heads (1)" in run.sentence()


def test_a_port_in_use(train):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = train(env={"MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"})
    assert f"MASTER_PORT {port} is in use" in check_sentence(run)


@pytest.fixture
def data(tmp_path):
    """A data set of two documents with the tokens 0 to 499."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=numpy.int32)
    for first in (0, 250):
        builder.add_document(torch.arange(first, first + 250), [250])
    builder.finalize(str(tmp_path / "text.idx"))
    return tmp_path / "text"


def test_data_of_a_larger_vocabulary(train, data):
    run = train(data_path=data, split="1,1,0")
    assert "holds token 499, but the model's vocabulary has 128 entries" in check_sentence(run)


def test_a_split_that_leaves_a_set_empty_is_refused_where_megatron_would_hang(train, data):
    run = train(data_path=data, split="969,30,1", eval_iters=1, vocab_size=600)
    assert "--split 969,30,1 leaves the validation set of --data-path" in check_sentence(run)
    assert "without one of its 2 documents" in run.text


def test_no_evaluation_interval(train):
    assert "--eval-interval is missing" in check_sentence(train(eval_interval=None))


def test_a_report_that_cannot_be_written(train, tmp_path):
    run = train(report=False, adacc_report=tmp_path)
    assert "is a folder: name a file in it" in check_sentence(run)
    (tmp_path / "file").touch()
    run = train(report=False, adacc_report=tmp_path / "file" / "report.json")
    assert "report.json cannot be written" in check_sentence(run)


def test_data_that_is_none(train, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_text("garbage")
    run = train(data_path=tmp_path / "text")
    assert "cannot be read as a Megatron data set" in check_sentence(run)


def test_a_list_of_data_sets_that_is_not_there(train, tmp_path):
    run = train(mock_data=False, data_args_path=tmp_path / "list.txt")
    assert "--data-args-path" in check_sentence(run)
    assert "cannot be read as a list of data sets" in run.text


@pytest.mark.distributed
def test_what_only_a_later_rank_sees_is_said(jobs):
    tokens = jobs.flags({**jobs.MODEL, "mock-data": True, "train-iters": 1, "adacc-plan": "ful"})
    script = str(jobs.ROOT / "pretrain_gpt.py")
    job = jobs.start([*jobs.launcher(1), script, *tokens], RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    code, text = jobs.finish(job)
    assert code == 2
    assert "pretrain_gpt.py: error: --adacc-plan is 'ful'" in text


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_the_job_and_all_its_processes(ranks, jobs, tmp_path):
    report = tmp_path / "report.json"
    tokens = jobs.flags(
        {**jobs.MODEL, "train-iters": 100000, "mock-data": True, "adacc-plan": "full", "adacc-report": report}
    )
    job = jobs.start([*jobs.launcher(ranks), str(jobs.ROOT / "pretrain_gpt.py"), *tokens])
    seen = []
    for line in job.stdout:
        seen.append(line)
        if "lm loss:" in line:
            break
    family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    assert len(family) >= ranks
    os.killpg(job.pid, signal.SIGINT)
    code, text = jobs.finish(job, seconds=60)
    assert code != 0
    # torchrun prints a traceback of its own; a rank of ours prints none.
    assert "pretrain_gpt.py: interrupted" in text or ranks > 1
    if ranks == 1:
        assert code == 130
        assert "Traceback" not in "".join(seen) + text
    deadline = time.monotonic() + 10
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.2)
    assert not list(tmp_path.glob(".report*"))
