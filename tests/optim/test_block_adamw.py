"""BlockAdamW as an optimizer: AdamW's bits with 32, near it with less, and a torch optimizer in all else."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc.errors import UserError
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.master import join, split
from megatron_adacc.optim.memory import adam_bytes, training_bytes

SHAPES = [(200, 33), (3, 5), (256,), (1, 1000), (0, 4)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape in SHAPES]


def twins(**options) -> tuple[list[nn.Parameter], BlockAdamW]:
    ours = parameters()
    return ours, BlockAdamW(ours, **{"min_quantized_numel": 0, "implementation": "torch", **options})


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.detach().clone()) for parameter in params]


def give(grads: list[Tensor | None], *groups: list[nn.Parameter]) -> None:
    for params in groups:
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = None if grad is None else grad.to(parameter.dtype, copy=True)


def random_grads() -> list[Tensor]:
    return [torch.randn(shape) * 10 ** (torch.rand(()) * 4 - 3) for shape in SHAPES]


def mixed(numel: int) -> Tensor:
    return torch.tensor([32, 8, 4, 16])[torch.arange(-(-numel // 256)) % 4]


# ---- 32 bits: torch's AdamW ----


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("chunk_blocks", [5, 1024])
def test_32_bits_are_adamw_bit_for_bit(weight_decay, maximize, chunk_blocks):
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": weight_decay, "maximize": maximize}
    ours, optimizer = twins(bits=32, chunk_blocks=chunk_blocks, **options)
    theirs = copies(ours)
    reference = torch.optim.AdamW(theirs, **options)
    for step in range(12):
        grads: list[Tensor | None] = list(random_grads())
        if step in (3, 4):
            grads[0] = None  # a parameter without a gradient: its step count stays behind
        if step == 6:
            grads = [torch.zeros(shape) for shape in SHAPES]
        give(grads, ours, theirs)
        optimizer.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        if a.numel():
            m, v = optimizer.moments(a)
            assert torch.equal(m, reference.state[b]["exp_avg"])
            assert torch.equal(v, reference.state[b]["exp_avg_sq"])


def test_32_bit_blocks_among_others_are_adamw_bit_for_bit():
    ours, optimizer = twins()
    theirs = copies(ours)
    reference = torch.optim.AdamW(theirs)
    optimizer.set_layout(ours[0], mixed(ours[0].numel()))
    optimizer.set_layout(ours[3], torch.tensor([8, 4, 16, 32]))  # the tail is the exact one
    for _ in range(5):
        give(random_grads(), ours, theirs)
        optimizer.step()
        reference.step()
    for index in (0, 3):
        a, b = ours[index].detach().view(-1), theirs[index].detach().view(-1)
        exact = (optimizer.layout(ours[index]) == 32).repeat_interleave(256)[: a.numel()]
        assert torch.equal(a[exact], b[exact])
        assert not torch.equal(a[~exact], b[~exact])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
def test_inf_and_nan_gradients_spoil_what_adamw_spoils(bits, value):
    ours, optimizer = twins(bits=bits)
    theirs = copies(ours)
    reference = torch.optim.AdamW(theirs)
    for step in range(4):
        grads = random_grads()
        if step == 1:
            grads[0][17, 4] = value
            grads[0][18, 4] = 1e30  # its square overflows, itself does not
        give(grads, ours, theirs)
        optimizer.step()
        reference.step()
    assert int(torch.isnan(theirs[0]).sum()) == 1
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(torch.isnan(a), torch.isnan(b))


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_without_gradients_only_weight_decay_acts(bits):
    ours, optimizer = twins(bits=bits, weight_decay=0.1, lr=0.5)
    before = copies(ours)
    for _ in range(2):
        give([torch.zeros(shape) for shape in SHAPES], ours)
        optimizer.step()
    for parameter, old in zip(ours, before, strict=True):
        torch.testing.assert_close(parameter, old * 0.95**2, rtol=1e-6, atol=0)


# ---- fewer bits ----


@pytest.mark.parametrize(("bits", "most"), [(16, 0.015), (8, 0.12), (4, 0.4)])
def test_fewer_bits_stay_near_adamw(bits, most):
    start = torch.randn(5000)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = BlockAdamW([ours], lr=1e-2, weight_decay=0, bits=bits, implementation="torch")
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0)
    for _ in range(60):
        ours.grad = torch.randn(5000) + 0.2
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert 0 < float((ours - theirs).detach().norm() / (theirs - start).detach().norm()) < most


def test_nearest_rounding_loses_what_moves_v_slowly():
    left = {}
    for rounding in ("nearest", "stochastic"):
        parameter = nn.Parameter(torch.zeros(2048))
        optimizer = BlockAdamW(
            [parameter], 0.0, (0.9, 0.99), min_quantized_numel=0, rounding=rounding, implementation="torch"
        )
        for step in range(200):
            parameter.grad = torch.ones(2048) if step == 0 else torch.zeros(2048)
            optimizer.step()
        left[rounding] = float(optimizer.moments(parameter)[1].mean() / 0.01)
    assert left["stochastic"] == pytest.approx(0.99**199, rel=0.1)
    assert left["nearest"] > 0.9  # where it started


def test_a_seed_repeats_and_another_does_not():
    grads = [random_grads() for _ in range(3)]
    results = []
    start = parameters()
    for seed in (1, 1, 2):
        ours = copies(start)
        optimizer = BlockAdamW(ours, bits=4, min_quantized_numel=0, seed=seed, implementation="torch")
        for step in grads:
            give(step, ours)
            optimizer.step()
        results.append(torch.cat([parameter.detach().view(-1) for parameter in ours]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_chunks_change_no_bit():
    start, results = parameters(), []
    grads = [random_grads() for _ in range(3)]
    for chunk_blocks in (1, 3, 1024):
        ours = copies(start)
        optimizer = BlockAdamW(ours, chunk_blocks=chunk_blocks, min_quantized_numel=0, implementation="torch")
        optimizer.set_layout(ours[0], mixed(ours[0].numel()))
        for step in grads:
            give(step, ours)
            optimizer.step()
        results.append(torch.cat([parameter.detach().view(-1) for parameter in ours]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_non_contiguous_parameters_are_worked_on_in_memory_order():
    base = torch.randn(40, 30)
    ours, theirs = nn.Parameter(base.clone().t()), nn.Parameter(base.clone().t())
    optimizer, reference = BlockAdamW([ours], bits=32), torch.optim.AdamW([theirs])
    for _ in range(3):
        grad = torch.randn(30, 40)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(optimizer.moments(ours)[0], reference.state[theirs]["exp_avg"])


def test_the_compiled_update_is_the_plain_one():
    start, results = nn.Parameter(torch.randn(9, 256)), []
    grads = [torch.randn(9, 256) for _ in range(3)]
    for implementation in ("torch", "compiled"):
        parameter = nn.Parameter(start.detach().clone())
        optimizer = BlockAdamW([parameter], bits=16, min_quantized_numel=0, implementation=implementation)
        for grad in grads:
            parameter.grad = grad.clone()
            optimizer.step()
        results.append((parameter.detach(), *optimizer.moments(parameter)))
    for plain, compiled in zip(*results, strict=True):
        # A last bit of float32 that differs may round another way once in 2^16.
        assert float((plain != compiled).double().mean()) < 0.01
        torch.testing.assert_close(plain, compiled, rtol=2**-7, atol=1e-6)


# ---- master weights ----


def test_a_remainder_holds_float32_to_the_bit():
    patterns = torch.randint(-(2**31), 2**31, (1 << 18,), dtype=torch.int64)
    ties = torch.arange(-(2**31), 2**31, 1 << 16, dtype=torch.int64) + 0x8000
    edges = torch.tensor([0x7F7FFFFF, 0x7F7F8000, 0x00000001, 0x7F800000, -0x80000000, -0x00800000])
    weights = torch.cat([patterns, ties, edges]).to(torch.int32).view(torch.float32)
    parameter = torch.empty(weights.shape, dtype=torch.bfloat16)
    remainder = torch.empty(weights.shape, dtype=torch.int16)
    split(weights, parameter, remainder)
    back, nan = join(parameter, remainder), torch.isnan(weights)
    assert torch.equal(back[~nan].view(torch.int32), weights[~nan].view(torch.int32))
    assert bool(torch.isnan(back[nan]).all())
    assert bool(torch.isnan(parameter[nan]).all())
    # Rounded to the nearest: torch's own rounding but for ties, which go away from zero.
    tie = (weights.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(parameter[~nan & ~tie], weights.to(torch.bfloat16)[~nan & ~tie])


@pytest.mark.parametrize("master", ["remainder", "float32"])
def test_bfloat16_parameters_train_float32_master_weights_exactly(master):
    ours = parameters(torch.bfloat16)
    optimizer = BlockAdamW(ours, bits=32, master=master)
    theirs = [nn.Parameter(parameter.detach().float()) for parameter in ours]
    reference = torch.optim.AdamW(theirs)
    for _ in range(10):
        grads = [grad.to(torch.bfloat16).float() for grad in random_grads()]
        give(grads, ours, theirs)
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(optimizer.master_weight(a), b)
            torch.testing.assert_close(a.float(), b, rtol=2**-8, atol=0)


def test_float16_parameters_have_float32_masters_and_refuse_a_remainder():
    ours = parameters(torch.float16)
    optimizer = BlockAdamW(ours, bits=32)
    give(random_grads(), ours)
    optimizer.step()
    assert all(torch.equal(p, optimizer.master_weight(p).half()) for p in ours)
    with pytest.raises(UserError, match="more than 2\\^16 float32 numbers"):
        BlockAdamW(ours, master="remainder")


# ---- memory ----


def test_mixed_precision_bytes():
    million = 1 << 20
    assert adam_bytes(million, torch.bfloat16).total == 16 * million
    eight = training_bytes(million, torch.bfloat16, 8)
    assert eight.total == 8 * million + 2 * million // 256  # and two exponent bytes a block
    assert training_bytes(million, torch.float16, 8).total == 10 * million + 2 * million // 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [32, 16, 8, 4, None])
def test_predicted_bytes_are_held_bytes(dtype, bits):
    ours = parameters(dtype)
    optimizer = BlockAdamW(ours, bits=bits or 8, min_quantized_numel=0, implementation="torch")
    if bits is None:
        for parameter in ours[:-1]:
            optimizer.set_layout(parameter, mixed(parameter.numel()))
    give(random_grads(), ours)
    optimizer.step()
    predicted = [training_bytes(p.numel(), dtype, optimizer.layout(p)) for p in ours]
    assert sum(each.state for each in predicted) == optimizer.state_bytes() > 0
    held = sum(p.nbytes + p.grad.nbytes for p in ours if p.grad is not None)
    assert sum(each.parameters + each.gradients for each in predicted) == held


# ---- what any torch optimizer does ----


def test_schedulers_clipping_groups_and_closures():
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8))
    twin = copy.deepcopy(model)
    losses = []
    for net, kind, extra in ((model, BlockAdamW, {"bits": 32}), (twin, torch.optim.AdamW, {})):
        groups = [{"params": [net[0].weight], "weight_decay": 0.1}, {"params": [net[0].bias, *net[2].parameters()]}]
        optimizer = kind(groups, lr=1e-2, **extra)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        torch.manual_seed(5)
        for _ in range(10):
            x = torch.randn(16, 64)

            def closure(optimizer=optimizer, net=net, x=x):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                return loss

            losses.append(float(optimizer.step(closure).detach()))
            schedule.step()
    assert losses[:10] == losses[10:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_loss_scaling_skips_a_step_with_inf():
    ours, optimizer = twins(bits=8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copies(ours)
    give(random_grads(), ours)
    scaler.scale(torch.zeros(()))  # the scaler wants to have been asked for its scale
    ours[0].grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
    assert optimizer.state_bytes() == 0
    give(random_grads(), ours)
    scaler.step(optimizer)
    assert not torch.equal(ours[0], before[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"amsgrad": True}, "no amsgrad"),
        ({"bits": 12}, "State of 12 bits"),
        ({"lr": -1.0}, "needs lr >= 0"),
        ({"eps": -1.0}, "needs eps >= 0"),
        ({"betas": (0.9, 1.0)}, "needs beta2 in"),
        ({"master": "none"}, "Master weights 'none'"),
        ({"rounding": "up"}, "no rounding 'up'; it is one of 'nearest', 'stochastic'"),
        ({"implementation": "triton"}, "no implementation 'triton'"),
        ({"chunk_blocks": 0}, "at least one block"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options, sentence):
    with pytest.raises(UserError, match=sentence):
        BlockAdamW(parameters(), **options)


def test_wrong_parameters_and_layouts_are_refused():
    with pytest.raises(UserError, match="float64"):
        BlockAdamW([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    with pytest.raises(UserError, match="without gaps"):
        BlockAdamW([nn.Parameter(torch.zeros(8)[::2])])
    ours, optimizer = twins()
    with pytest.raises(UserError, match="26 blocks of 256"):
        optimizer.set_layout(ours[0], torch.full((25,), 8))
    with pytest.raises(UserError, match="not a parameter"):
        optimizer.layout(torch.zeros(3))
