"""Bytes of moments in few bits, counted before anything is built; test_state_plan.py has them of jobs."""

import json

import pytest
import torch

from megatron_adacc import cli
from megatron_adacc.cost.static_memory import StaticBytes, Training
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
    assert "total, moments in 8 bits, remainder master" in capsys.readouterr().out


@pytest.mark.parametrize("training", [Training("fp32", "sgd"), Training("fp32", zero=3, data_parallel=2)])
def test_other_optimizers_and_divided_parameters_have_none(training):
    assert state_bytes.of_parameters(1000, training, StaticBytes()) == {}
