"""What the engine refuses, each in a sentence, and what it only reports."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach
from megatron_adacc.errors import UserError
from megatron_adacc.graph import fingerprint
from megatron_adacc.planner import Compress, Keep, LayerPlan, Plan, Recompute
from megatron_adacc.runtime.errors import ModifiedTensorError, TraceMismatchError


class Block(nn.Module):
    """norm, linear, GELU, linear, dropout, residual."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def settled(layer: nn.Module, plan: object = "recompute", shape: tuple[int, ...] = (4, 16)):
    """The layer attached, its key traced twice, so that the next call runs without the tracer."""
    handle = attach(layer, plan, min_bytes=0)
    for _ in range(2):
        y = layer(torch.randn(shape, requires_grad=True))
        torch.autograd.grad((y[0] if isinstance(y, tuple) else y).sum(), list(layer.parameters()), allow_unused=True)
    assert handle.traced_forwards == 2
    return handle


class Function(nn.Module):
    """A layer that is one Python function, with a parameter so that there is something to attach to."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) + self.weight


def test_another_number_of_saves_raises_naming_the_site() -> None:
    class Layer(Block):
        extra = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.sin() if Layer.extra == "more" else self.up(x).sin() if Layer.extra == "other" else y

    layer = Layer()
    settled(layer)
    Layer.extra = "more"
    with pytest.raises(TraceMismatchError, match=r"layer 0 \(Layer\) saved more than the 11 tensors of its trace"):
        layer(torch.randn(4, 16, requires_grad=True))
    Layer.extra = None
    layer(torch.randn(4, 16, requires_grad=True)).sum().backward()


def test_another_shape_raises_naming_the_site() -> None:
    class Layer(nn.Module):
        width = 16

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight)[:, : Layer.width].exp().sum(1)

    layer = Layer()
    settled(layer)
    Layer.width = 8
    with pytest.raises(
        TraceMismatchError, match=r"\(4, 8\).*where its trace has /exp.0, torch.float32 of shape \(4, 16"
    ):
        layer(torch.randn(4, 16, requires_grad=True))


def test_modified_input_raises_where_a_recipe_starts_from_it() -> None:
    layer = Function(lambda x: x.exp().sin())
    settled(layer, shape=(3,))
    x = torch.ones(3, requires_grad=True) * 1.0
    y = layer(x)
    x.add_(1)
    with pytest.raises(ModifiedTensorError, match="input:0 was modified in place after the forward"):
        y.sum().backward()


def test_torch_func_is_refused_in_a_sentence() -> None:
    layer = Block(0.0)
    settled(layer)
    with pytest.raises(UserError, match=r"cannot run inside torch.func transforms"):
        torch.func.grad(lambda x: layer(x).sum())(torch.randn(4, 16))


def test_disabled_hooks_are_refused_in_a_sentence() -> None:
    layer = Block(0.0)
    settled(layer)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(UserError, match="needs saved-tensor hooks, and they are disabled here"),
    ):
        layer(torch.randn(4, 16, requires_grad=True))


def test_another_hook_pair_is_named(caplog: pytest.LogCaptureFixture) -> None:
    layer = Block(0.0)
    settled(layer)
    with torch.autograd.graph.save_on_cpu():
        layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert "Another pair of saved-tensor hooks" in caplog.text
    assert "layer 0 (Block)" in caplog.text


def test_create_graph_with_a_lossy_plan() -> None:
    layer = Block(0.0)
    with attach(layer, "recompute", min_bytes=0) as handle:
        layer(torch.randn(4, 16, requires_grad=True))
        layer(torch.randn(4, 16, requires_grad=True))
        name = handle.plan.layers[0].fingerprint
    plan = Plan((LayerPlan(name, (("/gelu.0", Compress("group_int4")),)),))
    settled(layer, plan)
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(UserError, match=r"create_graph=True differentiates through /gelu.0"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_attach_refuses_what_it_cannot_attach() -> None:
    layer = Block()
    with pytest.raises(UserError, match="needs at least one layer"):
        attach([])
    with pytest.raises(UserError, match="takes modules; it was given a int"):
        attach([layer, 3])
    with pytest.raises(UserError, match="the same layer twice"):
        attach([layer, layer])
    with pytest.raises(UserError, match="a Linear and the Block that contains it"):
        attach([layer, layer.up])
    with attach(layer.up), pytest.raises(UserError, match="A Linear inside this Block is attached already"):
        attach(layer)
    with attach(layer), pytest.raises(UserError, match="This Block is attached already"):
        attach(layer)
    with pytest.raises(UserError, match=r"The plan file nowhere\.json cannot be read: No such file"):
        attach(layer, "nowhere.json")


@pytest.mark.parametrize(
    ("site", "action", "sentence"),
    [
        ("dropout/div_.0", Recompute(), "recomputes dropout/div_.0, which is not possible: .*draws random numbers"),
        ("elsewhere/mm.0", Keep(), "names elsewhere/mm.0, which Block does not save"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(site: str, action: object, sentence: str) -> None:
    layer = Block()
    with attach(layer, "keep") as handle:
        layer(torch.randn(4, 16, requires_grad=True))
    plan = Plan((LayerPlan(fingerprint(handle.graphs[0]), ((site, action),)),))
    attach(layer, plan)

    def two_calls() -> None:
        """What cannot be recomputed is known for sure when the second trace agrees with the first."""
        for _ in range(2):
            layer(torch.randn(4, 16, requires_grad=True))

    with pytest.raises(UserError, match=sentence):
        two_calls()


def test_a_plan_for_another_model_is_refused() -> None:
    layer = Block()
    attach(layer, Plan((LayerPlan("0" * 16, (("other/mm.0", Recompute()),)),), name="other"))
    with pytest.raises(UserError, match="Plan other has no entry for layer 0, Block with graph"):
        layer(torch.randn(4, 16, requires_grad=True))
