"""Bytes of moments in few bits, counted before anything is built; test_state_plan.py has them of jobs."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_adacc import cli
from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, tensors
from megatron_adacc.cost.stage_plan import Room
from megatron_adacc.cost.static_memory import ONE_BUCKET, StaticBytes, Training, of_chunk
from megatron_adacc.megatron import state_bytes
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.memory import training_bytes


@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_they_are_counted_without_torch_as_with_it(bits):
    for elements in (1, 255, 256, 257, 4096, 10**6 + 1):
        assert state_bytes.moment_bytes(elements, bits) == training_bytes(elements, torch.float32, bits).moments


def test_parameters_of_no_model_and_an_optimizer_of_as_many(capsys):
    arguments = ["memory", "--params", "100001", "--precision", "bf16"]
    assert cli.main([*arguments, "--json", "-"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    for bits, plan in stage["state_plans"].items():
        parameter = torch.zeros(100001, dtype=torch.bfloat16, requires_grad=True)
        optimizer = BlockAdamW([parameter], bits=int(bits))
        optimizer.layout(parameter)  # makes the state
        assert plan["moments"] + 2 * 100001 == optimizer.state_bytes()  # m and v, remainder
        assert plan["total_bytes"] == (2 + 4 + 4) * 100001 + plan["moments"]
        assert plan["with_remainder_bytes"] == (2 + 4 + 2) * 100001 + plan["moments"]
    assert cli.main(arguments) == 0
    assert "moments in 8 bits, remainder master: in all" in capsys.readouterr().out


def test_a_plan_for_an_absent_device_counts_them():
    model = GptModel(2, 64, 4, 4, 16, 256, 128, 16)
    chunk, training = tensors(model, Chunk(2)), Training("fp16")
    static = of_chunk(chunk, training)
    job = SimpleNamespace(
        training=training, buckets=ONE_BUCKET, tensor_parallel=1,
        tensors=lambda stage: (chunk,), static_bytes=lambda stage: static,
    )  # fmt: skip
    room = Room(fixed_bytes=10**7, floor_bytes=10**8)
    less = static.moments - state_bytes.of_chunk(chunk, training, 8)
    assert 0.7 * static.moments < less < 0.75 * static.moments
    found = state_bytes.with_plan(room, Namespace(adacc_state_plan="8"), job, 0)
    assert (found.fixed_bytes, found.floor_bytes) == (10**7 - less, 10**8 - less)
    for plan, sentences in (("full", 0), ("auto", 1)):
        args = Namespace(adacc_state_plan=plan)
        assert state_bytes.with_plan(room, args, job, 0) == room
        assert len(state_bytes.assumed(args)) == sentences


@pytest.mark.parametrize("training", [Training("fp32", "sgd"), Training("fp32", zero=3, data_parallel=2)])
def test_other_optimizers_and_divided_parameters_have_none(training):
    assert state_bytes.of_parameters(1000, training, StaticBytes()) == {}
