"""attach() and its handle: traces by key, plans by name, by value and from files, and a clean detach."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach, codecs
from megatron_adacc.planner import Compress, Keep, LayerPlan, Plan, Recompute
from megatron_adacc.runtime.key import numbering_attributes


class Block(nn.Module):
    def __init__(self, number: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).tanh())


def stack(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block(i) for i in range(count))


def run(layers: nn.ModuleList, rows: int = 4) -> Tensor:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(0)
    y = x
    for layer in layers:
        y = layer(y)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


class TestTraces:
    def test_two_calls_are_traced_whatever_the_number_of_layers(self) -> None:
        layers = stack(12)
        handle = attach(layers, min_bytes=0)
        run(layers)
        run(layers)
        assert handle.traced_forwards == 2
        assert len(handle.graphs) == 1
        assert len(handle.plan.layers) == 1

    def test_each_class_has_its_graph(self) -> None:
        layers = nn.ModuleList([*stack(3), nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)])
        handle = attach(layers, min_bytes=0)
        for _ in range(3):
            x = torch.randn(2, 4, 16, requires_grad=True)
            for layer in layers:
                x = layer(x)
        assert sorted(g.module for g in handle.graphs) == ["Block", "TransformerEncoderLayer"]
        assert handle.traced_forwards == 4

    def test_another_shape_mode_or_requires_grad_is_another_key(self) -> None:
        layers = stack(2)
        handle = attach(layers, min_bytes=0)
        plain = copy.deepcopy(layers)
        counts = []
        for rows, training, frozen in [(4, True, False), (2, True, False), (2, False, False), (2, False, True)]:
            for stack_ in (layers, plain):
                stack_.train(training)
                for layer in stack_:
                    layer.linear.requires_grad_(not frozen)
            for _ in range(2):
                assert torch.equal(run(layers, rows), run(plain, rows))
            counts.append(handle.traced_forwards)
        assert counts == [2, 4, 6, 8]

    def test_eval_with_gradients_stores_as_training_does(self) -> None:
        layers = stack(1).eval()
        handle = attach(layers, min_bytes=0)
        for _ in range(3):
            y = layers[0](torch.randn(4, 16, requires_grad=True))
        assert handle.stored_bytes() == 4 * 16 * 4
        del y

    def test_traces_are_bounded(self) -> None:
        layers = stack(1)
        plain = copy.deepcopy(layers)
        handle = attach(layers, min_bytes=0, traces_per_class=2)
        for rows in (2, 3, 4, 2, 3, 4):
            assert torch.equal(run(layers, rows), run(plain, rows))
        assert len(handle.graphs) == 2

    def test_attributes_that_number_the_layers(self) -> None:
        assert numbering_attributes(dict(enumerate(stack(3)))) == {("", "number")}
        assert numbering_attributes({0: Block(1), 4: Block(5)}) == {("", "number")}
        assert numbering_attributes({0: Block(1), 1: Block(5)}) == frozenset()
        assert numbering_attributes({0: Block(1)}) == frozenset()

    def test_numbers_that_do_not_count_make_another_key(self) -> None:
        layers = nn.ModuleList([Block(1), Block(5)])
        handle = attach(layers, min_bytes=0)
        for _ in range(3):
            run(layers)
        assert handle.traced_forwards == 4

    def test_dropout_rates_that_differ_make_another_graph(self) -> None:
        layers = nn.ModuleList([Block(0, 0.1), Block(1, 0.2)])
        handle = attach(layers, min_bytes=0)
        for _ in range(3):
            run(layers)
        assert len(handle.graphs) == 2


class TestPlans:
    def test_a_plan_file_made_by_one_run_serves_the_next(self, tmp_path: Path) -> None:
        layers = stack(2)
        plain = copy.deepcopy(layers)
        with attach(layers, min_bytes=0) as handle:
            run(layers)
            made = handle.plan
        assert made.name == "recompute"
        made.save(tmp_path / "plan.json")
        with attach(layers, tmp_path / "plan.json") as handle:
            for _ in range(3):
                assert torch.equal(run(layers), run(plain))
            assert handle.plan.layers == made.layers
        # The smaller last batch has another graph and the same sites.
        with attach(layers, str(tmp_path / "plan.json")):
            for _ in range(3):
                assert torch.equal(run(layers, 3), run(plain, 3))

    def test_layers_of_a_class_may_have_different_plans(self) -> None:
        layers = stack(2)
        plain = copy.deepcopy(layers)
        with attach(layers, min_bytes=0) as handle:
            run(layers)
            (made,) = handle.plan.layers
        second = LayerPlan(made.fingerprint, (("/tanh.0", Recompute()),), layer=1)
        first = LayerPlan(made.fingerprint, (("norm/native_layer_norm.0", Recompute()), ("/tanh.0", Keep())), layer=0)
        with attach(layers, Plan((first, second))) as handle:
            for _ in range(3):
                assert torch.equal(run(layers), run(plain))
            assert set(handle.plan.layers) == {first, second}
            heading, _, *rows = (re.split(" {2,}", line) for line in handle.report().splitlines()[1:])
            assert heading[5:7] == ["layer 0", "layer 1"]
            assert ["keep", "recompute, 2 ops"] in [row[5:7] for row in rows if row[0] == "/tanh.0"]

    def test_compress_takes_the_codec_of_the_role_and_holds_no_dropped_out_value_twice(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        handle = attach(layer, "compress", min_bytes=512)
        for _ in range(3):
            y = layer(torch.randn(4, 8, 16, requires_grad=True))
        assert handle.stored_bytes() < 0.4 * handle.graphs[0].activation_bytes
        y.square().sum().backward()
        assert handle.stored_bytes() == 0
        assert not handle.plan.lossless
        actions = {site: str(action) for site, action in handle.plan.layers[0].actions}
        assert actions["self_attn/_safe_softmax.0"] == "compress(affine_int4)"
        assert actions["self_attn/clone#1.0"] == "compress(channel_int4)"
        assert actions["norm1/native_layer_norm.0"] == "compress(outlier_int4)"
        assert actions["dropout/div_.0"] == "compress(bitmask)"
        assert actions["dropout/mul.0"] == "recompute"
        assert actions["self_attn/mul#2.0"] == "recompute"

    def test_quantize_is_int4_of_everything_with_the_papers_scale(self) -> None:
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        handle = attach(layer, "quantize", min_bytes=512)
        for _ in range(3):
            y = layer(torch.randn(4, 8, 16, requires_grad=True))
        (graph,) = handle.graphs
        actions = dict(handle.plan.layers[0].actions)
        direct, mask = Compress("group_int4", (("scale", "paper"),)), Compress("bitmask")
        large = [graph.buffers[b] for b in graph.saved if graph.buffers[b].nbytes >= 512]
        assert {b.site for b in large} == set(actions)
        masks = {site for site, action in actions.items() if action == mask}
        assert masks == {"self_attn/div_.0", "dropout1/div_.0", "dropout/div_.0", "dropout2/div_.0"}
        assert {action for site, action in actions.items() if site not in masks} == {direct}
        assert actions["input:0"] == direct
        small = sum(graph.buffers[b].nbytes for b in graph.saved if graph.buffers[b].nbytes < 512)
        held = sum(codecs.get(a.codec, **dict(a.options)).packed_bytes(b.base.size, torch.float32)
                   for b in large if isinstance(a := actions[b.site], Compress))  # fmt: skip
        assert handle.stored_bytes() == held + small
        y.square().sum().backward()
        assert handle.stored_bytes() == 0
        assert not handle.plan.lossless

    @pytest.mark.parametrize("plan", ["recompute", "compress", "quantize"])
    def test_float64_is_not_compressed(self, plan: str) -> None:
        layers = stack(1).double()
        with attach(layers, plan, min_bytes=0) as handle:
            for _ in range(3):
                y = layers[0](torch.randn(4, 16, dtype=torch.float64, requires_grad=True))
                y.sum().backward()
            assert not any(isinstance(action, Compress) for _, action in handle.plan.layers[0].actions)

    def test_small_buffers_are_kept_by_default(self) -> None:
        layers = stack(1)
        handle = attach(layers)
        run(layers)
        run(layers)
        assert handle.plan.layers[0].actions == ()

    def test_report(self) -> None:
        layers = stack(1)
        handle = attach(layers, min_bytes=0)
        assert handle.report() == "no layer was traced yet: nothing has run with gradients enabled"
        run(layers)
        run(layers)
        rows = [line.split() for line in handle.report().splitlines()]
        heading = "site role shape dtype bytes action not recomputable because"
        assert " ".join(rows[1]) == heading
        by_site = {row[0]: row for row in rows[3:]}
        assert by_site["/tanh.0"][-7:] == ["other", "4x16", "float32", "256", "recompute,", "3", "ops"]
        assert by_site["input:0"][-2:] == ["keep", "boundary"]
        assert "draws random numbers" in handle.report()


class TestDetach:
    def test_it_leaves_the_module_as_it_was(self) -> None:
        layers = stack(2)
        before = [dict(layer.__dict__) for layer in layers]
        with attach(layers, min_bytes=0):
            run(layers)
            assert "forward" in layers[0].__dict__
        assert [dict(layer.__dict__) for layer in layers] == before
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in layers.modules())

    def test_after_an_exception_too(self) -> None:
        layers = stack(1)
        with pytest.raises(RuntimeError, match="shape"), attach(layers, min_bytes=0):
            layers[0](torch.randn(4, 3, requires_grad=True))
        assert "forward" not in layers[0].__dict__
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in layers.modules())

    def test_a_forward_of_the_instances_own_comes_back(self) -> None:
        layer = Block()
        own = lambda x: x * 2  # noqa: E731
        layer.forward = own
        handle = attach(layer, min_bytes=0)
        assert torch.equal(layer(torch.ones(2, requires_grad=True)), torch.full((2,), 2.0))
        handle.detach()
        handle.detach()
        assert layer.__dict__["forward"] is own

    def test_backward_after_detach(self) -> None:
        layers = stack(1)
        plain = copy.deepcopy(layers)
        with attach(layers, min_bytes=0):
            for _ in range(3):
                x = torch.ones(4, 16, requires_grad=True)
                torch.manual_seed(0)
                y = layers[0](x)
        y.sum().backward()
        expected = torch.ones(4, 16, requires_grad=True)
        torch.manual_seed(0)
        plain[0](expected).sum().backward()
        assert torch.equal(x.grad, expected.grad)

    def test_copies_and_pickles_are_not_attached(self) -> None:
        layers = stack(1)
        with attach(layers, min_bytes=0) as handle:
            for other in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
                run(other)
                assert handle.traced_forwards == 0
                with torch.no_grad():
                    other[0].linear.weight.zero_()
                assert other[0].linear.weight is not layers[0].linear.weight
                assert torch.equal(other[0].eval()(torch.ones(1, 16)), torch.ones(1, 16) + other[0].linear.bias.tanh())


def test_importing_the_package_is_light() -> None:
    script = (
        "import sys, megatron_adacc; assert 'torch' not in sys.modules; from megatron_adacc import attach; "
        "print([m for m in ('triton', 'ortools', 'megatron', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
