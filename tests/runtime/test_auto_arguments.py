"""attach(plan="auto") tries layers out on copies of their arguments: of any kind, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from auto_training import HIDDEN, TOKENS, Mlp, Stack, compare, data
from torch import Tensor, nn

from megatron_adacc.cost import measured
from megatron_adacc.cost.prices import CodecPrice


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prices on disk; those of codecs made up, because to time one takes 64 MiB."""
    monkeypatch.setenv("ADACC_CACHE_DIR", "off")
    monkeypatch.setattr(measured, "time_codec", lambda *_: CodecPrice(1.0, 1.0))
    torch.manual_seed(0)


@dataclasses.dataclass
class State:
    hidden: Tensor
    gate: Tensor


class Argument(nn.Module):
    """An Mlp behind arguments of a kind; what it leaves in them is as if it ran once."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.mlp = Mlp()

    def forward(self, x: Any) -> Any:
        match self.kind:
            case "dataclass":
                return State(self.mlp(x.hidden) * x.gate.tanh(), x.gate)
            case "ordered dict":
                return OrderedDict(hidden=self.mlp(x["hidden"]) * x["gates"][0], gates=[x["gates"][0].sin(), None])
            case "complex":
                return torch.view_as_complex(self.mlp(torch.view_as_real(x).flatten(1)).view(TOKENS, -1, 2)) * x
        raise AssertionError


@pytest.mark.parametrize("kind", ["dataclass", "ordered dict", "complex"])
def test_differentiable_arguments_of_any_kind(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(HIDDEN, HIDDEN)
            self.stack = Stack(Argument(kind), Argument(kind))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            match kind:
                case "dataclass":
                    result = self.stack(State(x, x.sigmoid())).hidden
                case "ordered dict":
                    result = self.stack(OrderedDict(hidden=x, gates=[x.sigmoid(), None]))["hidden"]
                case _:
                    result = torch.view_as_real(self.stack(torch.view_as_complex(x.view(TOKENS, -1, 2)) * 2))
            assert isinstance(result, Tensor)
            return result

    compare(Model(), layers=lambda m: m.stack.layers)


class Cache:
    def __init__(self) -> None:
        self.rows: list[Tensor] = []


class Leaves(Mlp):
    """A layer whose forward leaves something behind in its arguments, in itself and in random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: torch.Generator | None = None
        self.last: Tensor | None = None

    def forward(self, x: Tensor, cache: Cache, seen: list[Tensor], count: Tensor) -> Tensor:  # type: ignore[override]
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(1)
        cache.rows.append(x.detach())
        seen.append(x.detach())
        count.add_(1)
        kept = torch.empty_like(x).bernoulli_(0.8, generator=self.generator)
        self.last = super().forward(x) * kept * torch.full((1,), random.random() + float(np.random.rand()))
        return self.last * 1.0


def test_a_rehearsal_leaves_nothing_behind() -> None:
    def call(model: nn.Module, seed: int) -> Tensor:
        cache, seen, count = Cache(), [], torch.zeros(3, dtype=torch.long)
        loss = model(data(seed), cache, seen, count).square().mean()
        assert len(cache.rows) == len(seen) == 2
        assert count.tolist() == [2, 2, 2]
        for layer, result in zip(model.layers, model.results, strict=True):  # type: ignore[arg-type]
            assert layer.last.data_ptr() != result.data_ptr()
            assert torch.equal(layer.last, result)
        return loss

    compare(Stack(Leaves(), Leaves()), call, "60%", exact=False)


def test_hugging_face_with_its_cache() -> None:
    """Models are called with use_cache as they are: each layer appends keys and values to one cache."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, attn_implementation="eager",
    )  # fmt: skip

    def call(model: nn.Module, seed: int) -> Tensor:
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(seed))
        output = model(tokens, labels=tokens)
        assert output.past_key_values.get_seq_length() == 12
        return output.loss

    compare(hf.LlamaForCausalLM(config).train(), call, layers=lambda m: m.model.layers, exact=False)
