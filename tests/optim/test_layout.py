"""Bits for each block under a limit, and the policy that bounds them."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron_adacc.errors import UserError
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.formats import STATE_BITS, block_bytes
from megatron_adacc.optim.importance import layout_errors
from megatron_adacc.optim.layout import choose
from megatron_adacc.optim.memory import choice_bytes, training_bytes
from megatron_adacc.optim.policy import PrecisionPolicy
from megatron_adacc.optim.reorganise import apply, propose


def brute_force(errors: Tensor, sizes: Tensor, floors: Tensor, limit: int) -> float | None:
    """The least error of all layouts within the limit, None if there is none."""
    best = None
    allowed = [[c for c in range(4) if STATE_BITS[c] >= floor] for floor in floors.tolist()]
    for columns in itertools.product(*allowed):
        if sum(int(sizes[block, column]) for block, column in enumerate(columns)) <= limit:
            error = sum(float(errors[block, column]) for block, column in enumerate(columns))
            best = error if best is None else min(best, error)
    return best


blocks = st.tuples(
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
    st.sampled_from([256, 256, 256, 100, 3]),
    st.sampled_from([4, 4, 8, 16, 32]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(blocks, min_size=1, max_size=4), st.floats(0, 1))
def test_no_layout_is_better_by_more_than_the_stated_gap(rows, share):
    errors = torch.tensor([row[0] for row in rows], dtype=torch.float64)
    sizes = torch.tensor([[block_bytes(row[1], bits) for bits in STATE_BITS] for row in rows])
    floors = torch.tensor([row[2] for row in rows])
    least = sum(block_bytes(row[1], row[2]) for row in rows)
    limit = int(least + share * (int(sizes[:, 0].sum()) - least))
    choice = choose(errors, sizes, floors, limit)
    columns = [STATE_BITS.index(bits) for bits in choice.bits.tolist()]
    assert all(bits >= floor for bits, floor in zip(choice.bits.tolist(), floors.tolist(), strict=True))
    assert choice.state_bytes == sum(int(sizes[b, c]) for b, c in enumerate(columns)) <= limit
    assert choice.error == sum(float(errors[b, c]) for b, c in enumerate(columns))
    best = brute_force(errors, sizes, floors, limit)
    assert best is not None
    assert choice.bound <= best + 1e-9 <= choice.error + 2e-9
    # The proof: at most what the first step that did not fit would have saved, and that is at most its size's worth.
    assert choice.error - choice.bound <= choice.error_per_byte * (int(sizes[:, 0].max()) - 1) + 1e-9
    with pytest.raises(UserError, match=f"at least {least} bytes"):
        choose(errors, sizes, floors, least - 1)


def test_a_limit_that_fits_all_gives_32_bits_and_a_limit_of_steps_is_optimal():
    # Errors that fall as the bytes do: every limit at a whole step is optimal.
    importance = torch.rand(50, dtype=torch.float64) + 0.1
    errors = importance.unsqueeze(1) * torch.tensor([0.0, 2e-4, 0.02, 0.1])
    sizes, floors = choice_bytes([50 * 256]), torch.full((50,), 4)
    everything = choose(errors, sizes, floors, 50 * 2048)
    assert bool((everything.bits == 32).all())
    assert everything.error == everything.bound == everything.error_per_byte == 0.0
    halves = choose(errors, sizes, floors, 50 * 258 + 10 * (514 - 258))
    assert halves.error == halves.bound
    assert sorted(importance.argsort(descending=True)[:10].tolist()) == (halves.bits == 8).nonzero().view(-1).tolist()
    assert halves.error_per_byte == pytest.approx(float(importance.sort().values[-11]) * 0.08 / 256)


def test_the_gap_vanishes_with_many_blocks():
    errors = torch.rand(20_000, 4, dtype=torch.float64).cumsum(1)
    choice = choose(errors, choice_bytes([20_000 * 256]), torch.full((20_000,), 4), 20_000 * 700)
    assert 20_000 * 700 - choice.state_bytes < 2048
    assert choice.bound <= choice.error <= choice.bound * (1 + 2e-4)


def test_spoiled_errors_are_refused():
    with pytest.raises(UserError, match="inf or NaN in the gradients"):
        choose(torch.tensor([[0.0, 1.0, torch.nan, 2.0]]), choice_bytes([256]), torch.tensor([4]), 10**6)


# ---- policy ----


def test_the_first_pattern_that_matches_decides():
    policy = PrecisionPolicy({"*norm*": 32, "*.mlp.*": [16, 8], "layers.1.*": 8})
    assert policy.lowest_bits("layers.1.norm.weight") == 32
    assert policy.lowest_bits("layers.0.mlp.weight") == 16
    assert policy.lowest_bits("layers.1.mlp.weight") == 8
    assert policy.lowest_bits("layers.1.attention.weight") == 8
    assert policy.lowest_bits("layers.2.attention.weight") == 4


@pytest.mark.parametrize(
    ("rules", "name", "sentence"),
    [
        ({"*": 12}, None, "value 12; it is 32, 16, 8 or 4"),
        ({"*": []}, None, "one entry for each layer"),
        ({"*": [8, 8]}, "layers.2.w", "list of 2 layers for '\\*', but 'layers.2.w' is in layer 2"),
        ({"*": [8, 8]}, "head.w", "has no layer number"),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(rules, name, sentence):
    with pytest.raises(UserError, match=sentence):
        PrecisionPolicy(rules).lowest_bits(name)


# ---- a whole optimizer ----


def trained(bits: int = 8) -> tuple[nn.Module, BlockAdamW]:
    model = nn.Sequential(nn.Linear(50, 200), nn.LayerNorm(200), nn.Linear(200, 30))
    optimizer = BlockAdamW(model.parameters(), lr=1e-3, bits=bits, min_quantized_numel=0, implementation="torch")
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(64, 50)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("bytes_per_element", [1.2, 2.2, 5.0, 9.0])
def test_a_reorganised_optimizer_holds_no_byte_above_the_limit(bytes_per_element):
    model, optimizer = trained()
    named = dict(model.named_parameters())
    numel = sum(parameter.numel() for parameter in model.parameters())
    limit = int(bytes_per_element * numel)
    proposal = propose(optimizer, named, limit, PrecisionPolicy({"1.*": 16}))
    apply(optimizer, proposal)
    assert optimizer.state_bytes() <= limit
    predicted = [training_bytes(p.numel(), p.dtype, optimizer.layout(p)).state for p in named.values()]
    assert optimizer.state_bytes() == sum(predicted)
    assert sum(predicted) > 0.9 * min(limit, 8 * numel)
    for name in ("1.weight", "1.bias"):
        lowest = torch.as_tensor(optimizer.layout(named[name])).min()
        assert int(lowest) >= 16
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(
        bool(torch.isfinite(p).all()) and not torch.equal(p, b) for p, b in zip(named.values(), before, strict=True)
    )


def test_important_blocks_get_the_bits():
    parameter = nn.Parameter(torch.zeros(8 * 256))
    optimizer = BlockAdamW([parameter], min_quantized_numel=0, implementation="torch")
    for _ in range(5):
        parameter.grad = torch.randn(8, 256).mul_(torch.tensor([1.0, 100.0] * 4).unsqueeze(1)).view(-1)
        optimizer.step()
    limit = 4 * (514 + 258) + 8
    free = propose(optimizer, {"w": parameter}, limit)
    assert free.layouts[parameter].tolist() == [4, 8] * 4
    # A diagonal that says the opposite turns it round.
    diagonal = torch.tensor([1e6, 1.0] * 4).repeat_interleave(256)
    asked = propose(optimizer, {"w": parameter}, limit, diagonals={"w": diagonal})
    assert asked.layouts[parameter].tolist() == [8, 4] * 4


def test_errors_rise_as_bits_fall():
    model, optimizer = trained()
    errors = layout_errors(optimizer, model[0].weight)
    assert errors.shape == (40, 4)
    assert bool((errors[:, 0] == 0).all())
    assert bool((errors.diff(dim=1) > 0).all())


def test_proposals_for_others_are_refused():
    model, optimizer = trained()
    named = dict(model.named_parameters())
    with pytest.raises(UserError, match="no parameter's name matches"):
        propose(optimizer, named, 10**9, PrecisionPolicy({"*attention*": 8}))
    named.popitem()
    with pytest.raises(UserError, match="name all of them"):
        propose(optimizer, named, 10**9)
