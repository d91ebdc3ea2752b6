"""The CPU bridge: what it answers, what it leaves alone, and that it goes away."""

import subprocess
import sys

import pytest
import torch

from megatron_adacc import devices
from megatron_adacc.devices import cpu
from megatron_adacc.errors import UserError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the bridge is for machines without a GPU")


@pytest.fixture
def bridge():
    cpu.install()
    yield
    cpu.uninstall()


def test_cuda_tensors_are_made_on_the_cpu(bridge):
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device="cuda:0"),
        torch.empty(2, device=torch.device("cuda", 0)),
        torch.ones(2, device=torch.cuda.current_device()),
        torch.empty_like(torch.zeros(2), device="cuda"),
        torch.zeros(2).new_zeros(3, device="cuda"),
        torch.zeros(2).cuda(),
        torch.zeros(2).cuda(0, non_blocking=True),
        torch.zeros(2).to("cuda"),
        torch.zeros(2).to(device="cuda", dtype=torch.float16),
        torch.zeros(2).to(0),
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2).to("cuda").weight,
        torch.empty(2, pin_memory=True),
    ]
    assert {str(tensor.device) for tensor in made} == {"cpu"}
    assert made[9].dtype == torch.float16


def test_to_keeps_its_other_meanings(bridge):
    assert torch.zeros(2).to(torch.float16).dtype == torch.float16
    assert torch.zeros(2).to(torch.zeros(1, dtype=torch.int32)).dtype == torch.int32
    assert torch.zeros(2).to("meta").device.type == "meta"
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_types_have_the_names_that_megatrons_optimizers_know(bridge):
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_it_does_not_claim_a_gpu(bridge):
    assert torch.cuda.is_available() is False
    assert torch.accelerator.is_available() is False


def test_torch_compile_is_unaffected(bridge):
    def function(x):
        return torch.nn.functional.gelu(x + torch.ones(4, device="cuda")) * 2

    x = torch.randn(4, 4)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), function(x))


def test_streams_and_events_do_nothing_in_order(bridge):
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        first.record()
    torch.cuda.current_stream().wait_event(first)
    second.record()
    torch.cuda.synchronize()
    assert first.query()
    assert first.elapsed_time(second) >= 0


def test_the_device_generator_is_the_one_dropout_draws_from(bridge):
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    drawn = torch.nn.functional.dropout(torch.ones(64), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn, torch.nn.functional.dropout(torch.ones(64), 0.5))
    torch.cuda.manual_seed(8)
    assert not torch.equal(drawn, torch.nn.functional.dropout(torch.ones(64), 0.5))


def test_a_data_loader_does_not_move_the_device_generator(bridge):
    before = torch.cuda.get_rng_state()
    list(torch.utils.data.DataLoader(range(4), batch_size=2, pin_memory=True))
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_without_the_bridge_a_data_loader_does_move_it():
    # What the bridge protects from: if torch stops doing this, the bridge has one line too many.
    before = torch.get_rng_state()
    list(torch.utils.data.DataLoader(range(4), batch_size=2))
    assert not torch.equal(before, torch.get_rng_state())


def test_uninstall_puts_everything_back():
    names = [(torch.cuda, "device_count"), (torch, "empty"), (torch.Tensor, "to"), (torch.Tensor, "type")]
    before = [getattr(owner, name) for owner, name in names]
    cpu.install()
    assert cpu.is_installed()
    assert torch.empty is not before[1]
    cpu.uninstall()
    assert [getattr(owner, name) for owner, name in names] == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_install_twice_is_once(bridge):
    empty = torch.empty
    cpu.install()
    assert torch.empty is empty


def test_choose():
    assert devices.choose(None) == "cpu"
    with pytest.raises(UserError, match="--adacc-device cuda asks for a GPU, but"):
        devices.choose("cuda")
    with pytest.raises(UserError, match="--adacc-device is 'tpu', but the known devices are cpu, cuda"):
        devices.choose("tpu")


def test_a_forced_cpu_hides_the_gpus_before_anything_asks():
    program = (
        "from megatron_adacc import devices; import os, torch;"
        "assert devices.choose('cpu') == 'cpu'; assert os.environ['CUDA_VISIBLE_DEVICES'] == '';"
        "assert torch.cuda.device_count() == 0"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
