"""Bases of fewer bits beside nn.Linear: the formats' errors and bytes, GPTQ, outliers, adapters, plans, refusals."""

import copy
import gc
import math

import pytest
import torch
from adapter_blocks import ROWS, WIDTH, Block, model, trained_b
from torch import nn

from megatron_adacc import adapters, attach
from megatron_adacc.adapters import frozen, gptq, nf4
from megatron_adacc.cost.finetuning import DECODED_ELEMENTS, Adapters, Linear, weight_bytes
from megatron_adacc.cost.rehearsal import Rehearsal
from megatron_adacc.cost.simulate import Fates, Simulator
from megatron_adacc.cost.timeline import record
from megatron_adacc.errors import UserError
from megatron_adacc.planner import Recompute
from megatron_adacc.runtime.cpu_peak import CpuPeak

NONE = torch.tensor([], dtype=torch.int64)
# What it takes to make a weight of a format, in tests of what all formats share.
MAKE = {
    "nf4": frozen.Nf4Weight,
    "nf4-double": frozen.DoubleNf4Weight,
    "int8": lambda weight: frozen.Int8Weight(weight, NONE),
    "gptq4": lambda weight: frozen.GptqWeight(weight, torch.eye(weight.shape[1])),
}


def inputs():
    return normal(ROWS, WIDTH, seed=2)


def backward(network, x):
    torch.manual_seed(3)
    network(x).square().sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def normal(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def relative_error(found, weight):
    """Squared."""
    return ((found - weight).double().square().sum() / weight.double().square().sum()).item()


class TestFormats:
    def test_nf4_has_the_published_formats_error_and_codes(self):
        weight = normal(512, 512)
        ours = frozen.Nf4Weight(weight)
        # The same sum with the published table and no code of ours: the least distance to c times each value.
        blocks = weight.view(-1, 64)
        candidates = blocks.abs().amax(1)[:, None] * torch.tensor(nf4.VALUES)
        least = torch.stack([(blocks - candidates[:, i : i + 1]).square() for i in range(16)]).amin(0)
        published = (least.double().sum() / blocks.double().square().sum()).item()
        assert relative_error(ours.dense(), weight) == pytest.approx(published, rel=1e-4)
        # bitsandbytes 0.50.2 says 0.0085 of its own, of a sample like this one.
        assert published == pytest.approx(0.0085, rel=0.02)
        assert relative_error(frozen.DoubleNf4Weight(weight).dense(), weight) == pytest.approx(published, rel=0.02)

    def test_nf4_is_bitsandbytes_bit_for_bit(self):
        functional = pytest.importorskip("bitsandbytes.functional")
        weight = normal(256, 1024)
        for ours, double in ((frozen.Nf4Weight(weight), False), (frozen.DoubleNf4Weight(weight), True)):
            codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
            assert torch.equal(codes.flatten(), ours.codes)
            theirs = functional.dequantize_4bit(codes, state)
            if double:
                assert torch.equal(state.state2.code, nf4.dynamic_values(torch.device("cpu")))
                assert (state.absmax.flatten() != ours.scales).float().mean() < 0.01
                assert relative_error(ours.dense(), weight) == pytest.approx(relative_error(theirs, weight), rel=0.001)
            else:
                assert torch.equal(theirs, ours.dense())

    def test_bytes(self):
        weight = normal(256, 1024)
        count = weight.numel()
        assert frozen.Nf4Weight(weight).nbytes == count * 4.5 / 8
        # 4 + 8 / 64 + 32 / (64 * 256) bits a parameter, and one float32 mean.
        assert frozen.DoubleNf4Weight(weight).nbytes == count * 4.126953125 / 8 + 4
        assert round(4.126953125, 3) == 4.127
        assert frozen.Int8Weight(weight, torch.tensor([5, 9])).nbytes == count + 4 * 256 + 2 * (8 + 4 * 256)
        assert frozen.PIECE == DECODED_ELEMENTS
        assert MAKE["gptq4"](weight).nbytes == count * (4 + (32 + 8) / 128) / 8

    @pytest.mark.parametrize("format", MAKE)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(64, 128), (7, 33), (65, 130), (1, 1)])
    def test_any_shape_and_dtype(self, format, shape, dtype, monkeypatch):
        # Several pieces, the last of them not whole.
        monkeypatch.setattr(nf4, "PIECE", 640)
        monkeypatch.setattr(frozen, "PIECE", 640)
        weight = (0.02 * normal(*shape)).to(dtype)
        made = MAKE[format](weight)
        found = made.dense()
        assert (found.shape, found.dtype, made.device) == (weight.shape, dtype, weight.device)
        assert relative_error(found, weight) < (0.001 if format == "int8" else 0.015)
        assert torch.equal(MAKE[format](weight).dense(), found)
        assert made.nbytes == weight_bytes(format, *shape, dtype.itemsize)
        # A cast is of what comes out: in float32 it is what the parts say, which the cast does not round.
        assert torch.equal(copy.deepcopy(made).float().dense().to(dtype), found)
        assert torch.equal(MAKE[format](torch.zeros_like(weight)).dense(), torch.zeros_like(weight))

    def test_outlier_columns_of_int8_keep_their_bits_and_the_other_columns_their_precision(self):
        weight, outliers = normal(64, 256), torch.tensor([200, 3])
        # What features of 60 times the size do to the output, and columns of 60 times the size to the rows' scales.
        wide = weight.index_copy(1, outliers, 60 * weight[:, outliers])
        separated, plain = frozen.Int8Weight(wide, outliers).dense(), frozen.Int8Weight(wide, NONE).dense()
        rest = [j for j in range(256) if j not in (3, 200)]
        assert torch.equal(separated[:, outliers], wide[:, outliers])
        assert not torch.equal(plain[:, outliers], wide[:, outliers])
        assert relative_error(separated[:, rest], wide[:, rest]) < 1e-4
        assert relative_error(plain[:, rest], wide[:, rest]) > 0.01
        x = torch.zeros(8, 256).index_copy_(1, outliers, 60 * normal(8, 2))
        assert torch.equal(x @ separated.T, x @ wide.T)
        assert not torch.equal(x @ plain.T, x @ wide.T)


class TestGptq:
    def test_what_it_minimizes_and_that_it_does(self):
        weight, x = normal(48, 96), normal(400, 96) @ normal(96, 96, seed=1)
        found = gptq.quantize(weight, x.T @ x)
        values = frozen.GptqWeight(weight, x.T @ x).dense()
        exact = (x @ (weight - values).T).square().sum() / (x @ weight.T).square().sum()
        assert found.error == pytest.approx(exact.item(), rel=1e-3)
        assert found.error < 0.7 * found.nearest_error

    def test_it_corrects_by_hand(self):
        # Two equal features: what the first is rounded down by, the second is given.
        weight = torch.tensor([[0.4, 0.4, 15.0, 0.0]])
        hessian = torch.ones(4, 4) * 1e4 + 1e-2 * torch.eye(4)
        found = gptq.quantize(weight, hessian)
        assert found.codes.flatten()[:2].tolist() == [0, 1]
        assert found.error < found.nearest_error

    def test_features_that_the_text_never_has_are_rounded_to_nearest(self):
        weight = normal(16, 64)
        x = normal(200, 64)
        x[:, 7] = 0
        values = frozen.GptqWeight(weight, x.T @ x).dense()
        assert (values[:, 7] - weight[:, 7]).abs().max() < 0.5

    def test_it_is_never_worse_than_round_to_nearest(self):
        for seed in range(4):
            found = gptq.quantize(normal(4, 16, seed), normal(1, 16).T @ normal(1, 16))
            assert found.error <= found.nearest_error


def calibrated(format, network, x):
    """The arguments of quantize_base beside names and format."""
    if format not in ("int8", "gptq4"):
        return {}
    layers = {"layers": network} if format == "gptq4" else {}
    return {"run": lambda: network(x), **layers}


class TestLayers:
    @pytest.mark.parametrize("format", MAKE)
    @pytest.mark.parametrize("adapters_first", [False, True])
    def test_output_and_gradients_are_those_of_the_dense_weights(self, format, adapters_first):
        network, x = model(), 3 * inputs()
        if adapters_first:
            adapters.inject(network, ["up", "down"], rank=4)
        made = adapters.quantize_base(network, ["up", "down"], format, **calibrated(format, network, x))
        assert list(made) == ["0.up", "0.down", "1.up", "1.down"] == list(adapters.quantized_modules(network))
        assert not any(name.endswith(("up.weight", "down.weight")) for name, _ in network.named_parameters())
        dense = model()
        for name, weight in made.items():
            dense.get_submodule(name).weight.data.copy_(weight.dense())
        torch.manual_seed(3)
        base = dense(x)
        if not adapters_first:
            adapters.inject(network, ["up", "down"], rank=4)
        adapters.inject(dense, ["up", "down"], rank=4)
        torch.manual_seed(3)
        # Before the first step a model with adapters gives what its base gives.
        assert torch.equal(network(x), base)
        trained_b(network)
        trained_b(dense)
        expected, found = backward(dense, x), backward(network, x)
        assert expected.keys() == found.keys() == adapters.adapter_state(network).keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert all(found[name].abs().max() > 0 for name in found)

    @pytest.mark.parametrize("format", MAKE)
    def test_a_plan_holds_nothing_of_a_weight_and_leaves_every_bit(self, format):
        plain, x = model(), inputs()
        adapters.quantize_base(plain, ["up", "down"], format, **calibrated(format, plain, x))
        adapters.inject(plain, ["up"], rank=4)
        trained_b(plain)
        planned = copy.deepcopy(plain)
        handle = attach(planned, plan="recompute", min_bytes=0)
        for _ in range(3):
            plain.zero_grad()
            planned.zero_grad()
            expected, found = backward(plain, x), backward(planned, x)
            assert all(torch.equal(expected[name], found[name]) for name in expected)
        (graph, *_) = handle.graphs
        decoded = [op for op in graph.ops if op.target.startswith("adacc.decode_")]
        assert len(decoded) == 2 * len(planned)
        weights = {b for op in decoded for b in op.writes}
        assert not weights & {pack.view.buffer for pack in graph.packs}
        handle.detach()

    def test_a_quantized_linear_without_an_adapter_holds_no_bytes(self):
        network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        adapters.quantize_base(network, ["0", "1"], "nf4")
        layers = nn.ModuleList([network])
        handle = attach(layers, plan="keep", min_bytes=0)
        for _ in range(3):
            y = network(normal(ROWS, WIDTH).requires_grad_())
            held = handle.stored_bytes()
            y.sum().backward()
        assert held == 0
        (graph,) = handle.graphs
        assert graph.activation_bytes == 0
        handle.detach()

    def test_the_predicted_peak_has_the_decoded_weight_and_what_decoding_needs(self):
        layer, x = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), normal(8, 256)
        adapters.quantize_base(layer, ["0", "2"], "nf4-double")
        adapters.inject(layer, ["0"], rank=4)
        x.requires_grad_()
        with attach(layer, "recompute", min_bytes=0) as handle:
            for _ in range(3):
                layer(x).sum().backward()
            ((trace,),) = (cache.traces() for cache in handle.caches)
            program = handle.caches[0].program(trace, 0)
            timeline = record(program.graph, Rehearsal(layer, handle.forwards[0].original, (x,), {}))
            dropped = {b for b in program.graph.saved if isinstance(program.action(b), Recompute)}
            found = Simulator(program.graph, timeline, program.context).memory(Fates({}, frozenset(dropped)))
            meter = CpuPeak()
            try:

                def peak(call):
                    gc.collect()
                    meter.start()
                    result = call()
                    return result, meter.stop()[0]

                _, idle = peak(lambda: None)
                loss, forward = peak(lambda: layer(x).sum())
                _, backward_ = peak(loss.backward)
            finally:
                meter.close()
        weight = 4 * 256 * 1024
        decoding = Adapters(4, ("0",), "nf4-double").decoding_bytes([Linear("0", 1024, 256, True)])
        assert decoding == 2 * weight
        for predicted, measured in ((found.forward, forward - idle), (found.backward, backward_ - idle)):
            assert weight < predicted
            assert predicted < measured <= predicted + decoding

    def test_memory_goes_down_by_the_weights(self):
        network = nn.Sequential(nn.Linear(256, 1024, bias=False))
        before = network[0].weight
        (weight,) = adapters.quantize_base(network, ["0"], "nf4-double").values()
        assert not list(network.parameters())
        assert sum(b.nbytes for b in network.buffers()) == weight.nbytes < 0.13 * before.nbytes + 8
        state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        other = nn.Sequential(nn.Linear(256, 1024, bias=False))
        adapters.quantize_base(other, ["0"], "nf4-double")
        other.load_state_dict(state)
        x = normal(2, 256)
        assert torch.equal(other(x), network(x))

    def test_autocast_multiplies_in_its_own_dtype(self):
        network = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        dense = copy.deepcopy(network)
        (weight,) = adapters.quantize_base(network, ["0"], "nf4").values()
        dense[0].weight.data.copy_(weight.dense())
        results = []
        for each in (network, dense):
            x = inputs().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = each(x)
            y.float().square().sum().backward()
            results += [y, x.grad]
        assert results[0].dtype == torch.bfloat16
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])

    def test_gptq_goes_layer_by_layer_and_beats_rounding_on_every_linear(self):
        # Correlated inputs, as a trained model's are.
        x = inputs() @ normal(WIDTH, WIDTH, seed=8) + 2.0
        network = model(3)
        first = copy.deepcopy(network)
        made = adapters.quantize_base(network, ["up", "down"], "gptq4", run=lambda: network(x), layers=network)
        for name, weight in made.items():
            error, nearest = weight.rounded_errors
            assert error < nearest, name
        # The second layer was calibrated on what the first one, in four bits, gives.
        seen = x
        with torch.no_grad():
            seen = network.eval()[0](seen)
            up = network[1].norm(seen)
        same = frozen.GptqWeight(first[1].up.weight, up.T @ up)
        assert torch.equal(same.codes, made["1.up"].codes)
        assert network.training is False

    def test_int8_finds_the_outlier_features_of_the_users_text(self):
        network = nn.Sequential(*(Block() for _ in range(2)))
        with torch.no_grad():
            network[0].norm.weight[5] = 60.0
            network[1].norm.weight[[7, 9]] = 60.0
        made = adapters.quantize_base(network, ["up", "down"], "int8", run=lambda: network(inputs()))
        assert 5 in made["0.up"].indices
        assert {7, 9} <= set(made["1.up"].indices.tolist())
        # Layers of one name have equally many, so that one trace serves them.
        assert len(made["0.up"].indices) == len(made["1.up"].indices)
        assert len(made["0.down"].indices) == len(made["1.down"].indices)


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"format": "nf3"}, "format is 'nf3', but the known ones are nf4, nf4-double, int8, gptq4"),
            ({"names": ["norm"]}, "norm is a LayerNorm"),
            ({"names": ["wrong"]}, "'wrong', but no layer"),
            ({"format": "int8"}, "int8 is calibrated on text"),
            ({"format": "gptq4", "layers": []}, "gptq4 is calibrated on text"),
            ({"format": "gptq4", "run": lambda: None}, "give the model's stack of layers"),
            ({"format": "int8", "run": lambda: None}, "does not reach 0.up"),
        ],
    )
    def test_what_cannot_be_meant_is_a_sentence_and_leaves_the_model_alone(self, arguments, sentence):
        network = model()
        with pytest.raises(UserError, match=sentence):
            adapters.quantize_base(network, **{"names": ["up"], "format": "nf4", **arguments})
        assert not adapters.quantized_modules(network)
        assert network.training

    def test_weights_that_fewer_bits_cannot_hold(self):
        network = model()
        network[1].up.weight.data[0, 0] = math.inf
        with pytest.raises(UserError, match=r"1\.up has elements that are not finite"):
            adapters.quantize_base(network, ["up"], "nf4")
        assert not adapters.quantized_modules(network)

    def test_twice_and_merging(self):
        network = model()
        adapters.quantize_base(network, ["up"], "nf4")
        with pytest.raises(UserError, match="that has none yet"):
            adapters.quantize_base(network, ["up"], "nf4")
        adapters.inject(network, ["up"], rank=2)
        with pytest.raises(UserError, match="cannot hold a sum"):
            adapters.merge(network)
