"""Saving, resuming, re-sharding, and going on with torch's AdamW."""

import copy
import io

import pytest
import torch
from torch import nn

from megatron_adacc.errors import UserError
from megatron_adacc.optim import BlockAdamW


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def fresh(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [(40, 35), (9,), (512,)]]


def block_adamw(parameters: list[nn.Parameter], **options) -> BlockAdamW:
    return BlockAdamW(parameters, **{"bits": 4, "min_quantized_numel": 100, "implementation": "torch", **options})


def through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_resumed_run_is_the_run_that_was_never_stopped(dtype):
    whole, parts = fresh(dtype), fresh(dtype)
    straight, first = block_adamw(whole), block_adamw(parts)
    for optimizer, parameters in ((straight, whole), (first, parts)):
        optimizer.set_layout(parameters[0], torch.tensor([32, 4, 8, 16, 4, 8]))
        train(optimizer, parameters, 3, seed=1)
    saved = through_a_file({"weights": parts, "optimizer": first.state_dict()})
    resumed = [nn.Parameter(weight) for weight in saved["weights"]]
    second = block_adamw(resumed)
    second.load_state_dict(saved["optimizer"])
    train(straight, whole, 3, seed=2)
    train(second, resumed, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert all(
        torch.equal(straight.master_weight(a), second.master_weight(b)) for a, b in zip(whole, resumed, strict=True)
    )


def test_loading_copies():
    parameters = fresh()
    optimizer = block_adamw(parameters)
    train(optimizer, parameters, 1, seed=1)
    other = fresh()
    second = block_adamw(other)
    second.load_state_dict(optimizer.state_dict())
    before = optimizer.moments(parameters[0])[0]
    train(second, other, 1, seed=2)
    assert torch.equal(optimizer.moments(parameters[0])[0], before)


def test_a_copy_goes_on_like_the_original():
    parameters = fresh()
    optimizer = block_adamw(parameters, seed=7)
    train(optimizer, parameters, 2, seed=1)
    others, copied = copy.deepcopy((parameters, optimizer))
    train(optimizer, parameters, 2, seed=2)
    train(copied, others, 2, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_adamw_goes_on_from_the_full_precision_state():
    ours, theirs = fresh(), fresh()
    optimizer = block_adamw(ours, bits=32, lr=1e-2)
    reference = torch.optim.AdamW(theirs, lr=1e-2)
    train(optimizer, ours, 3, seed=1)
    train(reference, theirs, 3, seed=1)
    continued = torch.optim.AdamW(ours, lr=5.0)
    continued.load_state_dict(through_a_file(optimizer.full_precision_state()))
    train(continued, ours, 3, seed=2)
    train(reference, theirs, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_full_precision_state_holds_what_the_blocks_say():
    ours = fresh()
    optimizer = block_adamw(ours, bits=8)
    train(optimizer, ours, 3, seed=1)
    state = optimizer.full_precision_state()
    for number, parameter in enumerate(ours):
        m, v = optimizer.moments(parameter)
        assert torch.equal(state["state"][number]["exp_avg"], m)
        assert torch.equal(state["state"][number]["exp_avg_sq"], v)
        assert float(state["state"][number]["step"]) == 3.0


def test_an_adamw_state_is_loaded_into_the_present_layouts():
    ours, theirs = fresh(), fresh()
    reference = torch.optim.AdamW(theirs, lr=1e-2)
    train(reference, theirs, 3, seed=1)
    optimizer = block_adamw(ours)
    layout = torch.tensor([32, 4, 8, 16, 4, 8], dtype=torch.uint8)
    optimizer.set_layout(ours[0], layout)
    optimizer.load_state_dict(reference.state_dict())
    assert torch.equal(optimizer.layout(ours[0]), layout)
    m, _ = optimizer.moments(ours[0])
    expected = reference.state[theirs[0]]["exp_avg"]
    assert torch.equal(m.view(-1)[:256], expected.view(-1)[:256])
    assert not torch.equal(m, expected)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[0]["bits"] == 4
    train(optimizer, ours, 1, seed=2)
    assert optimizer.state[ours[0]]["step"] == 4


def test_two_shards_continue_a_whole_state():
    ours = [nn.Parameter(torch.randn(2048))]
    optimizer = block_adamw(ours, bits=8, min_quantized_numel=0)
    train(optimizer, ours, 3, seed=1)
    state = optimizer.full_precision_state()
    m, v = optimizer.moments(ours[0])
    for shard in (slice(0, 768), slice(768, 2048)):
        part = [nn.Parameter(ours[0].detach()[shard].clone())]
        second = block_adamw(part, bits=8, min_quantized_numel=0)
        own = {"state": {0: {**state["state"][0], "exp_avg": m[shard], "exp_avg_sq": v[shard]}}}
        second.load_state_dict({**state, **own})
        # Whole blocks go to one shard, so their codes are the same.
        assert torch.equal(second.moments(part[0])[0], m[shard])
        assert torch.equal(second.moments(part[0])[1], v[shard])


def test_a_new_layout_keeps_values_that_it_can_hold_and_codes_of_blocks_that_stay():
    parameter = nn.Parameter(torch.randn(5 * 256 + 40))
    optimizer = block_adamw([parameter], bits=4, min_quantized_numel=0)
    train(optimizer, [parameter], 4, seed=1)
    before = optimizer.moments(parameter)
    optimizer.set_layout(parameter, torch.tensor([4, 32, 4, 32, 4, 4]))
    for old, new in zip(before, optimizer.moments(parameter), strict=True):
        assert torch.equal(old, new)
    optimizer.set_layout(parameter, torch.tensor([8, 32, 4, 16, 32, 4]))
    for old, new in zip(before, optimizer.moments(parameter), strict=True):
        assert torch.equal(old.view(-1)[512:768], new.view(-1)[512:768])
        assert torch.equal(old.view(-1)[1024:], new.view(-1)[1024:])
        torch.testing.assert_close(old[768:1024], new[768:1024], rtol=2**-7, atol=0)


def test_states_that_do_not_fit_are_refused():
    ours = fresh()
    optimizer = block_adamw(ours)
    train(optimizer, ours, 1, seed=1)
    saved = optimizer.state_dict()
    other = [nn.Parameter(torch.randn(shape)) for shape in [(40, 99), (9,), (512,)]]
    with pytest.raises(UserError, match="does not fit"):
        block_adamw(other).load_state_dict(saved)
    with pytest.raises(UserError, match="does not fit"):
        block_adamw(fresh(torch.bfloat16)).load_state_dict(saved)
    with pytest.raises(UserError, match="neither BlockAdamW's nor AdamW's"):
        block_adamw(ours).load_state_dict({**saved, "state": {0: {"momentum_buffer": torch.zeros(40, 35)}}})
    reference = torch.optim.AdamW(fresh(), amsgrad=True)
    train(reference, reference.param_groups[0]["params"], 1, seed=1)
    with pytest.raises(UserError, match="amsgrad's maxima"):
        block_adamw(ours).load_state_dict(reference.state_dict())
    with pytest.raises(ValueError, match="parameter group"):
        block_adamw(fresh()[:2]).load_state_dict(saved)
