"""Layers whose parameters FSDP shards over two ranks, on the CPU over gloo: gradients as without the engine."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from megatron_adacc import attach, enable_memory_optim
from megatron_adacc.cost.measured import MeasuredPrices
from megatron_adacc.errors import UserError
from megatron_adacc.graph import LayerGraph
from megatron_adacc.runtime.attach import Handle

WIDTH, HEADS, WORDS, LAYERS = 32, 4, 64, 2
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """A transformer layer of plain PyTorch, with dropout: [b, s, WIDTH] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attention = self.drop((q @ k.transpose(-1, -2)).softmax(-1)) @ v
        x = x + self.drop(self.out(attention.transpose(1, 2).reshape(b, s, WIDTH)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float() + 0.0  # FSDP warns of a view


def sharded(reshard: bool = True, half: bool = False) -> Model:
    """Each layer and the root by fully_shard(); ``reshard``: parameters are let go of after the forward."""
    model = Model()
    policy = HALF if half else MixedPrecisionPolicy()
    for module in (*model.layers, model):
        fully_shard(module, reshard_after_forward=reshard, mp_policy=policy)
    return model


def steps(model: nn.Module, number: int = 2, layers: Callable[[], object] = lambda: None) -> Iterator[list[Tensor]]:
    """Training steps of two micro-batches each; gives the gradients of this rank's shards. ``layers`` is called
    between forward and backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(number):
        for last in (False, True):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
            words = torch.randint(WORDS, (2, 16), generator=generator)
            loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
            layers()
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        yield [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in gradients]
        optimizer.step()
        optimizer.zero_grad()


def equal(first: list[list[Tensor]], second: list[list[Tensor]]) -> bool:
    pairs = [pair for a, b in zip(first, second, strict=True) for pair in zip(a, b, strict=True)]
    return len(pairs) > 0 and all(torch.equal(a, b) for a, b in pairs)


def recomputed(handle: Handle) -> int:
    return sum(str(action) == "recompute" for layer in handle.plan.layers for _, action in layer.actions)


def check_bits(rank: int) -> None:
    """Lossless plans; the parameters are let go of after the forward and gathered again, or stay."""
    for reshard, half in ((True, False), (True, True), (False, False)):
        expected = list(steps(sharded(reshard, half)))
        for plan, limit in (("keep", None), ("recompute", None), ("auto", "40%")):
            model = sharded(reshard, half)
            with attach(model.layers, plan, min_bytes=0, limit=limit) as handle:
                seen = []

                def look() -> None:
                    weight = model.layers[0].up.weight  # noqa: B023
                    seen.append((isinstance(weight, DTensor), handle.stored_bytes()))  # noqa: B023

                assert equal(list(steps(model, layers=look)), expected), (reshard, half, plan)
                assert {gone for gone, _ in seen} == {reshard}
                assert handle.stored_bytes() == 0
                assert (recomputed(handle) > 0) == (plan != "keep")
                if plan == "recompute":
                    # Beside the layers' inputs, masks as bits and statistics nothing is held: above all no parameter.
                    assert seen[-1][1] < LAYERS * 2 * (2 * 16 * WIDTH * 4)


def check_lossy(rank: int) -> None:
    """Compressed activations, under adaptation: the error is that of the codecs."""
    expected = list(steps(sharded(), 4))
    world = dist.group.WORLD
    assert world is not None
    model = sharded()
    settings = {"plan": "compress", "warmup_steps": 1, "check_gradients_every": 1, "max_gradient_error": 10.0}
    with enable_memory_optim(model, settings, groups=[world]) as handle:
        found = []
        for gradients in steps(model, 4):
            found.append(gradients)
            handle.step(1.0)
        assert len(handle.attached.forwards) == LAYERS
        assert equal(found[:1], expected[:1])
        sizes = [(a - b).norm() / b.norm() for a, b in zip(found[-1], expected[-1], strict=True) if b.numel() > 100]
        assert 0 < max(sizes) < 1.0
        plans = [handle.attached.plan.to_json()] * 2
        dist.all_gather_object(plans, plans[0])
        assert plans[0] == plans[1]
        assert "int4" in plans[0]


class Crooked(MeasuredPrices):
    """A clock that finds early ops cheap and late ones dear, or the other way about."""

    def op_us(self, graph: LayerGraph, op: int) -> float | None:
        us = super().op_us(graph, op)
        return None if us is None else 10.0 * (1.3, 0.8)[dist.get_rank()] ** op


def check_one_plan(rank: int) -> None:
    """Ranks whose clocks differ have one plan before the first backward."""
    import megatron_adacc.runtime.auto as auto

    auto.MeasuredPrices = Crooked  # type: ignore[misc]
    world = dist.group.WORLD
    assert world is not None
    expected = list(steps(sharded()))
    for groups, alike in (([world], True), ([], False)):
        model = sharded()
        with attach(model.layers, "auto", limit="50%", groups=groups) as handle:
            plans: list[list[str]] = []

            def look() -> None:
                both = [""] * 2
                assert handle.stage is not None
                dist.all_gather_object(both, handle.plan.to_json())
                plans.append(both)  # noqa: B023

            assert equal(list(steps(model, layers=look)), expected)
            assert [a == b for a, b in plans] == [alike] * 4
    with pytest.raises(UserError, match="Process groups are for the plan 'auto'; the plan 'keep' is the same on all"):
        attach(sharded().layers, "keep", groups=[world])


def check_refusals(rank: int) -> None:
    model = Model()
    for layer in model.layers:
        fully_shard(layer.up)
        fully_shard(layer)
    with pytest.raises(UserError, match=r"contains up, whose parameters are sharded by.* or attach the parts"):
        attach(model.layers, "keep")
    # What the sentence names as the way out.
    expected = list(steps(model))
    model = Model()
    for layer in model.layers:
        fully_shard(layer.up)
        fully_shard(layer)
    with attach([layer.up for layer in model.layers], "recompute", min_bytes=0):
        assert equal(list(steps(model)), expected)
    # Sharded after attach(): found when the layer runs.
    model = Model()
    with attach(model.layers, "keep"):
        fully_shard(model.layers[0].up)
        with pytest.raises(UserError, match=r"^layer 0 \(Block\) contains up, whose"):
            next(steps(model))
    model = Model()
    with attach(model.layers, "recompute", min_bytes=0) as handle:
        for module in (*model.layers, model):
            fully_shard(module)
        assert equal(list(steps(model)), list(steps(sharded())))
        assert recomputed(handle) > 0
    model = sharded()
    with (
        attach(model.layers, "keep") as handle,
        pytest.raises(UserError, match="no gradients of parameters that are"),
    ):
        handle.gradient_errors(lambda: model(torch.ones(2, 16, dtype=torch.int64)).sum())


def check_fsdp1(rank: int) -> None:
    """FullyShardedDataParallel: the modules that it wraps are attached."""

    def wrapped(original: bool) -> nn.Module:
        policy = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(
            Model(), auto_wrap_policy=policy, use_orig_params=original, device_id=torch.device("cpu")
        )

    for original in (True, False):
        expected = list(steps(wrapped(original)))
        for plan, limit in (("recompute", None), ("auto", "40%")):
            model = wrapped(original)
            with attach([layer.module for layer in model.layers], plan, min_bytes=0, limit=limit) as handle:
                assert equal(list(steps(model)), expected)
                assert recomputed(handle) > 0
    with pytest.raises(UserError, match=r"attach the module that it wraps, which is its attribute \.module"):
        attach(wrapped(True).layers, "keep")


def worker(rank: int, path: str, checks: tuple[Callable[[int], None], ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.compiler.set_stance("force_eager")  # the codecs' plain functions give the same bits without compiling
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    try:
        for check in checks:
            check(rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("checks", [(check_bits, check_one_plan), (check_lossy, check_refusals, check_fsdp1)])
def test_two_ranks(checks: tuple[Callable[[int], None], ...], tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path / "store"), checks), nprocs=2)


@pytest.mark.parametrize("plan", ["keep", "recompute"])
def test_a_parameter_may_move_between_forward_and_backward(plan: str) -> None:
    """As where shards are gathered into other memory than before: recipes and saved views find it there."""

    def gradients(layer: Block, move: bool) -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(1)
        y = layer(torch.randn(2, 16, WIDTH).requires_grad_())
        for p in layer.parameters():
            if move:
                old, p.data = p.data, p.data.clone()
                old.untyped_storage().resize_(0)
        y.square().sum().backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain, layer = Block(), Block()
    layer.load_state_dict(plain.state_dict())
    with attach(layer, plan, min_bytes=0):
        for _ in range(3):
            pairs = zip(gradients(plain, False), gradients(layer, True), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_a_parameter_without_contents_is_named() -> None:
    layer = Block()
    layer.up.weight.untyped_storage().resize_(0)
    with attach(layer, "recompute"), pytest.raises(UserError, match=r"without the contents of up\.weight"):
        layer(torch.randn(2, 16, WIDTH))
