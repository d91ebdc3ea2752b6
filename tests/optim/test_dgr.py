"""Delayed group updates."""

import copy

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc.errors import UserError
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.dgr import DelayedGroups, groups_by_connectivity


class Stack(nn.Module):
    """Embedding, numbered layers, final norm and head."""

    def __init__(self, layers: int = 4, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def names_of(model: nn.Module, groups: list[list[nn.Parameter]]) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group] for group in groups]


def test_groups_are_consecutive_layers_with_their_neighbours():
    model = Stack()
    assert names_of(model, groups_by_connectivity(model.named_parameters(), 2)) == [
        ["embedding.weight", *(f"layers.{i}.0.{kind}" for i in (0, 1) for kind in ("weight", "bias"))],
        [
            *(f"layers.{i}.0.{kind}" for i in (2, 3) for kind in ("weight", "bias")),
            "norm.weight",
            "norm.bias",
            "head.weight",
        ],
    ]
    for count in (1, 3, 4):
        groups = groups_by_connectivity(model.named_parameters(), count)
        assert len(groups) == count
        assert [p for group in groups for p in group] == list(model.parameters())
    with pytest.raises(UserError, match="has 4 layers"):
        groups_by_connectivity(model.named_parameters(), 5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, stepper, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x * 3) % 10).backward()
        stepper.step()


def delayed(model: nn.Module, count: int, **options) -> tuple[torch.optim.Optimizer, DelayedGroups]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, DelayedGroups(optimizer, groups_by_connectivity(model.named_parameters(), count), **options)


def test_one_group_is_the_plain_optimizer_bit_for_bit():
    model = Stack()
    twin = copy.deepcopy(model)
    optimizer, groups = delayed(model, 1)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    train(model, optimizer, groups, 10)
    train(twin, reference, reference, 10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_each_group_moves_at_its_steps_by_the_mean_of_its_gradients():
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    groups = DelayedGroups(optimizer, [[weight] for weight in weights], compensation=0.0)
    seen = []
    for step in range(7):
        for index, weight in enumerate(weights):
            weight.grad = torch.tensor([10.0**index * 2**step])
        groups.step()
        seen.append([-float(weight.detach()) for weight in weights])
    # Group 0 at steps 0, 3, 6: 1; then (2 + 4 + 8) / 3; then (16 + 32 + 64) / 3. Group 1 at 1, 4; group 2 at 2, 5.
    first, second = 14 / 3, 112 / 3
    assert [row[0] for row in seen] == pytest.approx([1, 1, 1, *[1 + first] * 3, 1 + first + second])
    assert [row[1] for row in seen] == pytest.approx([0, 15, 15, 15, *[15 + 10 * 28 / 3] * 3])
    assert [row[2] for row in seen] == pytest.approx([0, 0, *[700 / 3] * 3, *[700 / 3 + 5600 / 3] * 2])


@pytest.mark.parametrize("compensation", [0.0, 1.0])
def test_eight_groups_apply_an_eighth_of_the_variance(compensation):
    class Record(torch.optim.Optimizer):
        """Keeps what it is given and moves nothing, so that noise is all there is."""

        def __init__(self, params) -> None:
            super().__init__(params, {})
            self.applied: list[Tensor] = []

        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    self.applied.append(parameter.grad.clone())

    weights = [nn.Parameter(torch.zeros(500)) for _ in range(8)]
    for count, share in ((8, 1 / 8), (1, 1.0)):
        optimizer = Record(weights)
        held = [[weight] for weight in weights] if count == 8 else [weights]
        groups = DelayedGroups(optimizer, held, compensation=compensation)
        for _ in range(88):
            for weight in weights:
                weight.grad = torch.randn(500) + 3.0
            groups.step()
        applied = torch.stack(optimizer.applied[8:])
        assert float(applied.var()) == pytest.approx(share, rel=0.15 if count == 8 else 0.02)
        assert float(applied.mean()) == pytest.approx(3.0, abs=0.02)


def test_compensation_is_the_outer_product_s_first_order():
    # f = (a w)^2 / 2 with w = (x, y): the Hessian is an outer product, a a^T, and at a.w = 1 it is g g^T.
    x, y = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([0.0]))
    optimizer = torch.optim.SGD([x, y], lr=0.1)
    groups = DelayedGroups(optimizer, [[x], [y]], compensation=1.0)

    def gradients() -> None:
        product = (x + 2 * y).detach()
        x.grad, y.grad = product.clone(), 2 * product

    gradients()
    groups.step()  # x falls by 0.1: the gradient of y, taken at x = 1, is worth 2 * 0.9 now
    gradients()
    groups.step()
    assert float(y.detach()) == pytest.approx(-0.1 * (2 * 0.9 + 2 * 0.9) / 2)


def test_a_resumed_run_is_the_run_that_was_never_stopped():
    straight, stopped = Stack(), None
    stopped = copy.deepcopy(straight)
    optimizer, groups = delayed(straight, 4)
    train(straight, optimizer, groups, 6, seed=1)
    train(straight, optimizer, groups, 6, seed=2)
    optimizer, groups = delayed(stopped, 4)
    train(stopped, optimizer, groups, 6, seed=1)
    state, optimizer_state = copy.deepcopy(groups.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer, groups = delayed(stopped, 4)
    optimizer.load_state_dict(optimizer_state)
    groups.load_state_dict(state)
    train(stopped, optimizer, groups, 6, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), stopped.parameters(), strict=True))
    with pytest.raises(UserError, match="saved gradients are of groups"):
        delayed(stopped, 2)[1].load_state_dict(state)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_quadratic_converges(count):
    basis, _ = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))
    hessian = basis @ torch.diag(torch.logspace(0, -1, 32, dtype=torch.float64)) @ basis.t()
    weights = [nn.Parameter(torch.ones(32 // count, dtype=torch.float64)) for _ in range(count)]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    groups = DelayedGroups(optimizer, [[weight] for weight in weights])
    losses = []
    for _ in range(150 * count):
        optimizer.zero_grad()
        vector = torch.cat(list(weights))
        loss = 0.5 * vector @ hessian @ vector
        loss.backward()
        groups.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 1e-6 * losses[0]


@pytest.mark.parametrize("count", [2, 4])
def test_it_works_with_block_adamw(count):
    model = Stack()
    optimizer = BlockAdamW(model.parameters(), lr=3e-2, min_quantized_numel=0, implementation="torch")
    groups = DelayedGroups(optimizer, groups_by_connectivity(model.named_parameters(), count))
    x = torch.arange(10)
    before = float(nn.functional.cross_entropy(model(x), (x * 3) % 10).detach())
    train(model, optimizer, groups, 40 * count)
    assert float(nn.functional.cross_entropy(model(x), (x * 3) % 10).detach()) < 0.5 * before


def test_wrong_groups_are_refused():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    groups = groups_by_connectivity(model.named_parameters(), 2)
    with pytest.raises(UserError, match="exactly one group"):
        DelayedGroups(optimizer, groups[:1])
    with pytest.raises(UserError, match="exactly one group"):
        DelayedGroups(optimizer, [*groups, groups[0][:1]])
    with pytest.raises(UserError, match="lambda"):
        DelayedGroups(optimizer, groups, compensation=-1.0)
