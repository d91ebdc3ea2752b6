"""Recipes: what can be rebuilt from what, how steps are scheduled, and that replay proves or refuses them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.graph import Availability, LayerGraph, group_recipes, trace, unverified
from megatron_adacc.graph.bits import bits_equal
from megatron_adacc.graph.verify import REPLAY_DIFFERS, holds_two_values


class Function(nn.Module):
    """A layer that is one function of its input and a parameter of ones."""

    def __init__(self, function: Callable[..., Tensor], size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def graph_of(function: Callable[..., Tensor], size: int = 8) -> LayerGraph:
    return trace(Function(function, size), torch.randn(4, size, requires_grad=True))


def site(graph: LayerGraph, name: str) -> int:
    (found,) = (b.index for b in graph.buffers if b.site == name)
    return found


class TestAvailability:
    def test_slice_stops_at_what_is_stored(self) -> None:
        graph = graph_of(lambda x, w: x.exp().sin().tanh().sigmoid())
        last = site(graph, "/sigmoid.0")
        assert len(Availability(graph, ()).slice(last)) == 4
        assert len(Availability(graph, (site(graph, "/sin.0"),)).slice(last)) == 2
        assert Availability(graph, (last,)).slice(last) == frozenset()

    def test_what_depends_on_random_numbers_has_no_recipe(self) -> None:
        graph = graph_of(lambda x, w: (x + torch.rand_like(x)).exp())
        problem = Availability(graph, ()).problem(site(graph, "/exp.0"))
        assert problem == "the layer: aten.rand_like.default draws random numbers"

    def test_dropped_out_value_is_rebuilt_from_its_mask(self) -> None:
        graph = graph_of(lambda x, w: nn.functional.dropout(x, 0.5).exp())
        evidence = unverified(graph)
        assert {graph.buffers[b].site for b in evidence.verified} == {"/exp.0"}
        assert {graph.buffers[b].site for b in evidence.two_valued} == {"/div_.0"}

    def test_overwritten_input_is_no_source(self) -> None:
        graph = graph_of(lambda x, w: (x * 1.0).add_(1))
        assert Availability(graph, ()).problem(site(graph, "/mul.0")) is None

        def overwrite(x: Tensor, w: Tensor) -> Tensor:
            y = x.exp()
            x.detach().add_(1)
            return y

        graph = graph_of(overwrite)
        assert Availability(graph, ()).problem(site(graph, "/exp.0")) == "the layer writes over its input 0"

    def test_changed_module_buffer_is_no_source(self) -> None:
        class Counter(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", torch.ones(8))

            def forward(self, x: Tensor) -> Tensor:
                self.count.add_(1)
                return (x * self.count).exp()

        graph = trace(Counter(), torch.randn(4, 8, requires_grad=True))
        assert Availability(graph, ()).problem(site(graph, "/exp.0")) == "the layer changes module buffer count"

    def test_long_chains_need_no_deep_stack(self) -> None:
        def chain(x: Tensor, w: Tensor) -> Tensor:
            for _ in range(3000):
                x = x.neg()
            return x.exp()

        graph = graph_of(chain)
        assert Availability(graph, ()).problem(site(graph, "/exp.0")) is None
        assert len(Availability(graph, ()).slice(site(graph, "/exp.0"))) == 3001


class TestGroups:
    def test_recipes_that_share_an_op_run_it_once(self) -> None:
        graph = graph_of(lambda x, w: x.exp().sin() * x.exp().cos())
        dropped = [b for b in graph.saved if graph.buffers[b].writer is not None]
        groups = group_recipes(graph, (), dropped)
        ops = [step.op for group in groups for step in group.steps]
        assert len(groups) == 2  # each half of the product
        assert len(ops) == len(set(ops)) == 4

    def test_a_kept_buffer_parts_groups(self) -> None:
        graph = graph_of(lambda x, w: x.exp().sin().exp().sin().exp())
        dropped = [site(graph, "/exp.0"), site(graph, "/exp#2.0")]
        assert len(group_recipes(graph, (), dropped)) == 1
        assert len(group_recipes(graph, (site(graph, "/exp#1.0"),), dropped)) == 2

    def test_intermediates_are_freed_by_their_last_reader(self) -> None:
        graph = graph_of(lambda x, w: x.neg().neg().neg().exp())
        (group,) = group_recipes(graph, (), [site(graph, "/exp.0")])
        first, second, third, last = (b for step in group.steps for b in graph.ops[step.op].writes)
        frees = [set(step.frees) - set(group.sources) for step in group.steps]
        assert frees == [set(), {first}, {second}, {third}]
        assert last == site(graph, "/exp.0")

    def test_in_place_op_writes_into_a_copy_of_what_others_need(self) -> None:
        graph = graph_of(lambda x, w: x.exp().add_(1).tanh())
        exp, tanh = site(graph, "/exp.0"), site(graph, "/tanh.0")
        (group,) = group_recipes(graph, (), [exp, tanh])
        assert [step.copies for step in group.steps] == [(), (exp,), ()]
        (group,) = group_recipes(graph, (), [tanh])
        assert [step.copies for step in group.steps] == [(), (), ()]

    def test_without_recipe_the_site_and_reason_are_named(self) -> None:
        graph = graph_of(lambda x, w: nn.functional.dropout(x, 0.5))
        with pytest.raises(ValueError, match=r"/div_.0 cannot be recomputed: the layer: aten.bernoulli_.float draws"):
            group_recipes(graph, (), [site(graph, "/div_.0")])


class TestVerification:
    def run(self, layer: nn.Module, calls: int = 3, size: int = 8) -> Any:
        handle = attach(layer, "recompute", min_bytes=0)
        for seed in range(calls):
            x = torch.randn(16, size, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            layer(x).sum().backward()
        return handle

    def test_a_replay_that_differs_is_not_offered_and_the_report_says_so(self) -> None:
        class Counting(torch.autograd.Function):
            """Invisible to the tracer, and another result each time."""

            calls = 0

            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                Counting.calls += 1
                return torch.from_numpy(x.detach().numpy() + Counting.calls)

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g

        class Hidden(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return Counting.apply(x)

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.hidden = Hidden()

            def forward(self, x: Tensor) -> Tensor:
                return self.hidden(x).exp().sin()

        handle = self.run(Layer())
        assert REPLAY_DIFFERS in handle.report()
        (plan,) = handle.plan.layers
        assert plan.actions == ()

    def test_what_empty_returns_is_not_taken_for_a_result(self) -> None:
        """An invisible kernel fills the tensor: a replay of `empty` alone may find the old bytes by luck."""

        class Fill(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                y = torch.empty_like(x)
                y.detach().numpy()[:] = 3.0
                return y

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g

        layer = Function(lambda x, w: (Fill.apply(x) * w).exp())
        handle = self.run(layer)
        (plan,) = handle.plan.layers
        assert ("/mul.0", "recompute") not in [(s, str(a)) for s, a in plan.actions]
        assert REPLAY_DIFFERS in handle.report()

    def test_bits_equal(self) -> None:
        nan = torch.tensor([float("nan"), 1.0])
        assert bits_equal(nan, nan.clone())
        assert not bits_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
        assert not bits_equal(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
        assert not bits_equal(torch.zeros(2), torch.zeros(2, 1))
        assert bits_equal(torch.zeros(0), torch.zeros(0))
        assert bits_equal(torch.ones(3, 2).t(), torch.ones(2, 3))

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ([0.0, 1.25, 0.0], True),
            ([3.0, 3.0], True),
            ([0.0, -0.0], False),
            ([0.0, 1.0, 2.0], False),
            ([0.0, float("nan")], False),
            ([], False),
        ],
    )
    def test_two_valued(self, values: list[float], expected: bool) -> None:
        assert holds_two_values(torch.tensor(values)) is expected
        assert holds_two_values(torch.tensor([True, False, True]))
