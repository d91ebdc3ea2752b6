"""Random layers, drawn by hypothesis.

A random layer is a list of steps, run on a pool of values: each step takes values from the pool and puts its result
there, so that tensors are shared, reused, written in place and dropped in all combinations.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
ROWS = 8

UNARY = (
    "linear", "reused_linear", "norm", "rms", "gelu", "silu", "relu_", "exp", "sigmoid", "tanh", "dropout", "softmax",
    "transpose", "square", "slice", "half", "chunk", "add_one_", "mul_", "masked_fill_", "clone_then_scale_", "view",
    "cumsum", "sort", "expand", "frozen", "lora", "detached", "cat_self", "double", "index_put", "fill_slice",
)  # fmt: skip
BINARY = ("add", "mul", "matmul", "attention", "gate", "sub_", "cat", "where", "addcmul", "sdpa", "maximum")


@dataclass(frozen=True)
class Instruction:
    """``kind`` applied to pool values ``a`` and ``b``, counted from the newest."""

    kind: str
    a: int
    b: int


instructions = st.builds(Instruction, st.sampled_from(UNARY + BINARY), st.integers(0, 4), st.integers(0, 4))


@dataclass(frozen=True)
class Recipe:
    """A whole layer: its instructions and what it returns besides its last value."""

    steps: tuple[Instruction, ...]
    extra_output: bool
    none_output: bool


recipes = st.builds(Recipe, st.lists(instructions, min_size=1, max_size=9).map(tuple), st.booleans(), st.booleans())


class RandomLayer(nn.Module):
    """Input [ROWS, WIDTH] -> a tuple (tensor [ROWS, WIDTH], perhaps a second one, perhaps None)."""

    def __init__(self, recipe: Recipe, dropout: float = 0.3) -> None:
        super().__init__()
        self.recipe = recipe
        self.dropout = nn.Dropout(dropout)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in recipe.steps)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH))
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor | None, ...]:
        pool = [x]
        for i, step in enumerate(self.recipe.steps):
            a = pool[-1 - step.a % len(pool)]
            b = pool[-1 - step.b % len(pool)]
            pool.append(self._run(i, step.kind, a, b))
        outputs: list[Tensor | None] = [pool[-1]]
        if self.recipe.extra_output:
            outputs.append(pool[len(pool) // 2])
        if self.recipe.none_output:
            outputs.append(None)
        return tuple(outputs)

    def _run(self, i: int, kind: str, a: Tensor, b: Tensor) -> Tensor:
        match kind:
            case "linear":
                return self.linears[i](a)
            case "reused_linear":
                return self.shared(a)
            case "norm":
                return self.norm(a)
            case "rms":
                return a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-5) * self.scale
            case "gelu" | "silu" | "softmax":
                return F.softmax(a, dim=-1) if kind == "softmax" else getattr(F, kind)(a)
            case "relu_":
                return F.relu_(a * 1.0)
            case "exp":
                return (a * 0.1).exp()
            case "sigmoid" | "tanh":
                return getattr(torch, kind)(a)
            case "dropout":
                return self.dropout(a)
            case "transpose":
                return a @ a.t()
            case "square":
                return a.square() * 0.1
            case "slice":
                return torch.cat([a[:, 2:], a[:, :2]], dim=1)
            case "half":
                return a[:, ::2].repeat(1, 2)
            case "chunk":
                q, k, v = self.linears[i](a).repeat(1, 3).chunk(3, dim=-1)
                return q * k + v
            case "add_one_":
                return (a * 0.5).add_(1)
            case "mul_":
                y = a + 0.0
                y.mul_(self.scale)
                return y
            case "masked_fill_":
                return (a + 0.0).masked_fill_(self.table > 0.5, 0.0)
            case "clone_then_scale_":
                y = a.clone()
                y[:, : WIDTH // 2].mul_(0.5)
                return y
            case "view":
                return a.reshape(ROWS // 2, 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH).sin()
            case "cumsum":
                return a.cumsum(0) * 0.2
            case "sort":
                return a.sort(dim=-1).values
            case "expand":
                return a.mean(0, keepdim=True).expand(ROWS, WIDTH) * a
            case "frozen":
                return self.frozen(a)
            case "lora":
                return self.frozen(a) + self.up(self.down(a))
            case "detached":
                return a * a.detach()
            case "cat_self":
                return torch.stack([a, a], 0).mean(0)
            case "double":
                return (a.double() * 1.5).float()
            case "index_put":
                y = torch.zeros_like(a)
                y[torch.arange(ROWS).flip(0)] = a
                return y * self.table
            case "fill_slice":
                y = torch.empty_like(a)
                y[: ROWS // 2] = a[ROWS // 2 :]
                y[ROWS // 2 :] = a[: ROWS // 2].tanh()
                return y
            case "add":
                return a + b
            case "mul":
                return a * b
            case "matmul":
                return (a @ b.t()) @ a * 0.1
            case "attention":
                scores = (a @ b.t()) / WIDTH**0.5
                scores = scores.masked_fill(self.table.t() > 0.7, float("-inf"))
                return self.dropout(F.softmax(scores, dim=-1)) @ b
            case "gate":
                return F.silu(a) * b
            case "sub_":
                return (a + 1.0).sub_(b)
            case "cat":
                return torch.cat([a, b], dim=-1)[:, ::2] + 0.0
            case "where":
                return torch.where(a > b, a, b * 0.5)
            case "addcmul":
                return torch.addcmul(a, b, self.scale, value=0.3)
            case "sdpa":
                q, k = (t.view(1, 2, ROWS // 2, WIDTH) for t in (a.contiguous(), b.contiguous()))
                return F.scaled_dot_product_attention(q, k, k).reshape(ROWS, WIDTH)
            case "maximum":
                return torch.maximum(a, b)
        raise AssertionError(kind)
