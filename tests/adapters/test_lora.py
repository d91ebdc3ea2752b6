"""LoRA beside nn.Linear: the base's output at the start, its parameters, merging, its checkpoint, and plans."""

import copy

import pytest
import torch
from adapter_blocks import ROWS, WIDTH, model, trained_b
from torch import nn

from megatron_adacc import adapters, attach
from megatron_adacc.errors import UserError


def inputs():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))


def backward(network, x):
    torch.manual_seed(3)
    network(x).square().sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_an_adapter_changes_nothing_at_first_and_has_r_times_in_plus_out_parameters():
    base = model()
    adapted = copy.deepcopy(base)
    state = torch.get_rng_state()
    assert adapters.inject(adapted, ["up", "down"], rank=4) == ["0.up", "0.down", "1.up", "1.down"]
    assert torch.equal(torch.get_rng_state(), state)
    x = inputs()
    torch.manual_seed(3)
    expected = base(x)
    torch.manual_seed(3)
    assert torch.equal(adapted(x), expected)
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == 4 * 4 * (WIDTH + 4 * WIDTH)
    assert trained.keys() == adapters.adapter_state(adapted).keys()


def test_an_adapter_is_the_formula_and_its_gradients_are_those_of_the_formula():
    linear = nn.Linear(6, 5, dtype=torch.float64)
    network = nn.ModuleDict({"linear": linear})
    adapters.inject(network, ["linear"], rank=2, alpha=3)
    trained_b(network)
    x = torch.randn(7, 6, dtype=torch.float64)
    a, b = (m.detach().clone().requires_grad_() for m in (linear.lora_a, linear.lora_b))
    expected = x @ linear.weight.detach().T + linear.bias.detach() + 3 / 2 * (x @ a.T @ b.T)
    torch.testing.assert_close(linear(x), expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    linear(x).square().sum().backward()
    torch.testing.assert_close(linear.lora_a.grad, a.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear.lora_b.grad, b.grad, rtol=1e-12, atol=1e-12)
    assert linear.weight.grad is None
    assert linear.bias.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_rounds_once_and_unmerging_gives_every_bit_back(dtype):
    network = model().to(dtype).eval()
    adapters.inject(network, ["up", "down"], rank=4)
    trained_b(network)
    x = inputs().to(dtype)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    separate = network(x)
    adapters.merge(network)
    up = network[0].up
    exact = before["0.up.weight"].double() + 2.0 * before["0.up.lora_b"].double() @ before["0.up.lora_a"].double()
    half_ulp = exact.abs() * torch.finfo(dtype).eps / 2
    # Beside the one rounding, float32's own of the product.
    assert ((up.weight.double() - exact).abs() <= half_ulp + 1e-5 * exact.abs().max()).all()
    assert not torch.equal(up.weight, before["0.up.weight"])
    assert (network(x) - separate).norm() < 4 * torch.finfo(dtype).eps * separate.norm()
    with pytest.raises(UserError, match="merged already"):
        adapters.merge(network)
    adapters.unmerge(network)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(network(x), separate)


def test_an_adapter_checkpoint_goes_to_another_copy_of_the_base():
    first, second = model(), model()
    for network in (first, second):
        adapters.inject(network, ["up"], rank=4, seed=5)
    trained_b(first)
    state = adapters.adapter_state(first)
    assert set(state) == {f"{i}.up.lora_{m}" for i in range(2) for m in "ab"}
    adapters.load_adapter_state(second, state)
    x = inputs()
    assert torch.equal(first.eval()(x), second.eval()(x))
    with pytest.raises(UserError, match=r"has the shape \(1,\)"):
        adapters.load_adapter_state(second, {**state, "0.up.lora_a": torch.zeros(1)})
    with pytest.raises(UserError, match=r"has no 0\.up\.lora_a"):
        adapters.load_adapter_state(second, {k: v for k, v in state.items() if k != "0.up.lora_a"})


def test_a_plan_leaves_every_bit_of_the_adapters_gradients():
    plain = model()
    adapters.inject(plain, ["up", "down"], rank=4, dropout=0.1)
    trained_b(plain)
    planned = copy.deepcopy(plain)
    handle = attach(planned, plan="recompute", min_bytes=0)
    for _ in range(3):  # the first two forwards are traced
        plain.zero_grad()
        planned.zero_grad()
        expected, found = backward(plain, inputs()), backward(planned, inputs())
        assert expected.keys() == found.keys() == adapters.adapter_state(plain).keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    handle.detach()


def test_a_frozen_linear_without_an_adapter_holds_nothing_of_its_input():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.second(self.first(x))

    def held(freeze):
        layer = Chain()
        if freeze:
            adapters.inject(layer, ["first"], rank=4)
        handle = attach(layer, plan="keep", min_bytes=0)
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        for _ in range(2):
            layer(x).sum().backward()
        (graph,) = handle.graphs
        handle.detach()
        return graph.activation_bytes

    boundary, output, inner = (4 * ROWS * channels for channels in (WIDTH, WIDTH, 4))
    assert held(freeze=False) == boundary + output
    # A reads the boundary, B what A made of it; the second layer's input, the first's output, is not there.
    assert held(freeze=True) == boundary + inner


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"targets": ["wrong"]}, "asked for 'wrong', but no layer .* are down, norm, up"),
            ({"targets": ["up", "norm"]}, "norm is a LayerNorm"),
            ({"targets": []}, "at least one target"),
            ({"rank": 0}, "rank of an adapter is 0"),
            ({"alpha": -1.0}, "alpha of an adapter is -1"),
            ({"dropout": 1.0}, "dropout of an adapter is 1"),
        ],
    )
    def test_what_cannot_be_meant_is_a_sentence_and_leaves_the_model_alone(self, arguments, sentence):
        network = model()
        with pytest.raises(UserError, match=sentence):
            adapters.inject(network, **{"targets": ["up"], "rank": 4, **arguments})
        assert not adapters.adapted_modules(network)
        assert all(p.requires_grad for p in network.parameters())

    def test_a_weight_that_is_shared(self):
        network = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
        network["head"].weight = network["embedding"].weight
        with pytest.raises(UserError, match="The weight of head is that of embedding too"):
            adapters.inject(network, ["head"], rank=2)

    def test_an_adapter_beside_an_adapter(self):
        network = model()
        adapters.inject(network, ["up"], rank=2)
        with pytest.raises(UserError, match=r"0\.up has an adapter already"):
            adapters.inject(network, ["up"], rank=2)

    def test_nothing_to_merge(self):
        with pytest.raises(UserError, match="no adapters"):
            adapters.merge(model())
