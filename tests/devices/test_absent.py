"""As if on a GPU that is not there."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron_adacc.devices import cpu
from megatron_adacc.devices.absent import absent_cuda
from megatron_adacc.graph import trace

ASKED = ("current_device", "device_count", "get_device_capability", "get_device_properties", "get_rng_state", "Stream")


def test_torch_cuda_answers_for_the_absent_device() -> None:
    available = torch.cuda.is_available()
    with absent_cuda((9, 0), 80 * 2**30):
        assert torch.cuda.get_device_capability() == (9, 0)
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.minor, properties.total_memory) == (9, 0, 80 * 2**30)
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.is_available() == available
        tensor = torch.empty(1 << 50, dtype=torch.uint8)  # a pebibyte
        assert tensor.device == torch.device("cuda", 0)
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor.record_stream(torch.cuda.current_stream())


def test_conversions_keep_attributes_and_sharing_of_modules() -> None:
    with absent_cuda():
        layer = nn.Linear(8, 4)
        layer.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        layer.register_buffer("table", torch.ones(3))
        whole = nn.ModuleList([layer, layer]).cuda().half()
        assert layer.weight.dtype == layer.bias.dtype == layer.table.dtype == torch.float16
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.tensor_model_parallel
        assert len(list(whole.parameters())) == 2


def test_layer_with_a_compiled_function() -> None:
    """It runs op by op; CUDA's fused dropout keeps a mask of one byte an element."""

    @torch.compile
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x.sigmoid(), 0.1, True) * 2

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled(x)

    with absent_cuda():
        graph = trace(Layer(), torch.randn(4, 8, requires_grad=True))
    assert [(graph.buffers[b].site, graph.buffers[b].nbytes) for b in graph.saved] == [
        ("/sigmoid.0", 128),
        ("/native_dropout.1", 32),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_all_is_as_before(fails: bool) -> None:
    before = [getattr(torch.cuda, name) for name in ASKED]
    record_stream, apply, state = torch.Tensor.record_stream, nn.Module._apply, torch.get_rng_state()
    own = "record_stream" in vars(torch.Tensor)
    try:
        with absent_cuda():
            torch.randn(3)
            torch.cuda.manual_seed(1)
            assert torch.cuda.current_device is not before[0]
            if fails:
                raise ArithmeticError
    except ArithmeticError:
        assert fails
    assert [getattr(torch.cuda, name) for name in ASKED] == before
    assert (torch.Tensor.record_stream, nn.Module._apply) == (record_stream, apply)
    assert ("record_stream" in vars(torch.Tensor)) == own
    assert torch.equal(torch.get_rng_state(), state)
    assert not isinstance(torch.ones(1), FakeTensor)
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.square().sum(), x)
    assert gradient.tolist() == [2.0, 2.0]


def test_the_cpu_bridge_gives_way() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is no bridge where a GPU answers")
    was_installed = cpu.is_installed()
    cpu.install()
    try:
        assert torch.ones(1, device="cuda").device.type == "cpu"
        with absent_cuda():
            assert torch.ones(1, device="cuda").device.type == "cuda"
        assert torch.ones(1, device="cuda").device.type == "cpu"
    finally:
        if not was_installed:
            cpu.uninstall()
