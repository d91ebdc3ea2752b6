"""Peak bytes of a step on the CPU, against figures worked out by hand."""

import ctypes
import functools
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_adacc.errors import UserError
from megatron_adacc.runtime.peak import PeakBytes, PeakMeter

CPU = torch.device("cpu")


@pytest.fixture
def meter() -> Iterator[PeakMeter]:
    # What other tests left in reference cycles would otherwise be freed, and noticed, during a step.
    gc.collect()
    with PeakMeter(CPU) as peak_meter:
        yield peak_meter
    assert not torch._C._autograd._profiler_enabled()


def run_step(meter: PeakMeter, step: Callable[[], Any]) -> PeakBytes:
    meter.start_step()
    step()
    return meter.end_step()


def peak_of(meter: PeakMeter, step: Callable[[], Any]) -> int:
    """Peak bytes of a step, from what was live when it began."""
    idle = run_step(meter, lambda: None)
    peak = run_step(meter, step)
    assert (idle.uncertain_bytes, peak.uncertain_bytes) == (0, 0)
    assert idle.peak_bytes is not None
    assert peak.peak_bytes is not None
    return peak.peak_bytes - idle.peak_bytes


def floats(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.float32)


class TestByHand:
    def test_allocate_and_free(self, meter: PeakMeter) -> None:
        def step() -> None:
            a = floats(1000)
            b = floats(2000)  # a + b: 12000 bytes
            del a
            c = floats(500)  # b + c
            del b
            d = floats(2400)  # c + d: 11600 bytes
            del c, d

        assert peak_of(meter, step) == 12_000

    def test_the_level_is_that_of_all_live_tensors(self) -> None:
        gc.collect()
        with PeakMeter(CPU) as meter:
            small = run_step(meter, lambda: None)
        kept = floats(250_000)
        view = kept[10:]
        gradient = nn.Parameter(floats(100))
        gradient.sum().backward()  # makes .grad, which nobody has looked at
        with PeakMeter(CPU) as meter:
            large = run_step(meter, lambda: None)
        assert large.peak_bytes - small.peak_bytes == 1_000_000 + 2 * 400
        del view, kept

    def test_what_stays_is_the_level_of_the_next_step(self, meter: PeakMeter) -> None:
        kept = []
        assert peak_of(meter, lambda: kept.append(floats(1000))) == 4000
        before = run_step(meter, lambda: None).peak_bytes
        kept.append(floats(300))  # between two steps
        assert run_step(meter, lambda: None).peak_bytes == before + 1200
        kept.clear()
        assert run_step(meter, lambda: None).peak_bytes == before - 4000

    def test_matmul_chain(self, meter: PeakMeter) -> None:
        weights = [torch.randn(64, 64) for _ in range(4)]

        def step() -> None:
            hidden = weights[0]
            for weight in weights[1:]:
                hidden = hidden @ weight

        assert peak_of(meter, step) == 2 * 64 * 64 * 4  # the old and the new product

    def test_backward_of_an_mlp(self, meter: PeakMeter) -> None:
        x, grad = torch.randn(64, 64), torch.randn(64, 64)
        first, second = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

        def step() -> None:
            output = (x @ first).relu() @ second
            output.backward(grad)

        # The most is alive while relu's backward runs: the output, relu's result, the second weight's
        # gradient, the gradient after relu and the one before it.
        assert peak_of(meter, step) == 5 * 64 * 64 * 4

    def test_optimizer_state_and_gradients(self, meter: PeakMeter) -> None:
        weight = nn.Parameter(torch.randn(100, 100))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False)
        grad = torch.randn(100, 100)
        empty = run_step(meter, lambda: None).peak_bytes

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            (-weight).backward(grad)
            optimizer.step()

        first = run_step(meter, step)
        idle = run_step(meter, lambda: None).peak_bytes
        second = run_step(meter, step)
        # The gradient and its copy, the momentum, stay. The second step frees the first step's gradient
        # (which the first step could not), then makes the negated weight and its own gradient.
        assert (idle, first.peak_bytes) == (empty + 80_000, empty + 80_000)
        assert second.peak_bytes == empty + 40_000 + 80_000
        assert run_step(meter, lambda: optimizer.zero_grad()).peak_bytes == idle
        assert run_step(meter, lambda: None).peak_bytes == idle - 40_000

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_full_recompute_peaks_lower(self, meter: PeakMeter, use_reentrant: bool) -> None:
        layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)]
        x = torch.randn(64, 32, requires_grad=True)

        def step(recompute: bool) -> None:
            hidden = x
            for layer in layers:
                run = functools.partial(checkpoint, layer, use_reentrant=use_reentrant) if recompute else layer
                hidden = run(hidden)
            hidden.sum().backward()

        step(recompute=False)  # the gradients exist from here on
        plain, recomputed = (peak_of(meter, lambda r=r: step(recompute=r)) for r in (False, True))
        # Seven of eight layers hold their input (8192 bytes) and not GELU's input and output (32768 each).
        assert plain - recomputed > 6 * 65_536

    def test_other_threads_count(self, meter: PeakMeter) -> None:
        kept = []

        def step() -> None:
            thread = threading.Thread(target=lambda: kept.append(floats(1000)))
            thread.start()
            thread.join()
            kept.append(floats(10))

        assert peak_of(meter, step) == 4040

    def test_resize_and_set(self, meter: PeakMeter) -> None:
        def step() -> None:
            a = floats(1000)
            a.untyped_storage().resize_(0)
            b = floats(900)
            b.data = floats(50)

        assert peak_of(meter, step) == 4000


class TestBlocksOlderThanTheTable:
    def test_freed_during_a_step(self) -> None:
        old = [floats(1000), floats(100)]
        gc.collect()
        with PeakMeter(CPU) as meter:
            before = run_step(meter, lambda: None)
            step = run_step(meter, lambda: (old.pop(0), floats(500)))
            # The allocator said nothing of the 4000 bytes: the figure may be too high by them.
            assert (step.peak_bytes, step.uncertain_bytes) == (before.peak_bytes + 2000, 4000)
            after = run_step(meter, lambda: None)
            assert (after.peak_bytes, after.uncertain_bytes) == (before.peak_bytes - 4000, 0)

    def test_freed_between_steps(self) -> None:
        old = [floats(1000)]
        gc.collect()
        with PeakMeter(CPU) as meter:
            before = run_step(meter, lambda: None)
            old.clear()
            after = run_step(meter, lambda: None)
        assert (after.peak_bytes, after.uncertain_bytes) == (before.peak_bytes - 4000, 0)


class TestReadOnly:
    def test_training_is_bit_identical(self) -> None:
        def train(measured: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.TransformerEncoderLayer(16, 2, 32, 0.1)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            losses = []
            with PeakMeter(CPU) as meter:
                for _ in range(3):
                    if measured:
                        meter.start_step()
                    loss = model(torch.randn(4, 3, 16)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    if measured:
                        assert meter.end_step().peak_bytes > 0
                    losses.append(loss.detach())
            return [*losses, *model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))

    def test_compiled_functions_stay_compiled(self, meter: PeakMeter) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(lambda x: x.exp().sin(), backend="aot_eager", fullgraph=True)
        x = torch.randn(10)
        compiled(x)
        assert peak_of(meter, lambda: compiled(x)) == 80
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    def test_the_flag_of_c10_is_restored(self) -> None:
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_bool.in_dll(c10, "FLAGS_caffe2_report_cpu_memory_usage")
        level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
        before = level.value
        with PeakMeter(CPU) as meter:
            assert flag.value is False
            meter.start_step()
            assert flag.value is True
        assert (flag.value, level.value) == (False, before)

    def test_nothing_is_printed(self) -> None:
        script = """
import torch
from megatron_adacc.runtime.peak import PeakMeter
old = torch.empty(1000)
with PeakMeter(torch.device("cpu")) as meter:
    for _ in range(2):
        meter.start_step()
        kept = torch.ones(10) @ torch.ones(10)
        old = None
        assert meter.end_step().peak_bytes > 0
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", "")


class TestErrors:
    def test_an_exception_leaves_no_profiler_on(self) -> None:
        def train() -> None:
            with PeakMeter(CPU) as meter:
                meter.start_step()
                assert torch._C._autograd._profiler_enabled()
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            train()
        assert not torch._C._autograd._profiler_enabled()

    def test_a_step_that_was_not_ended_is_given_up(self, meter: PeakMeter) -> None:
        meter.start_step()
        kept = floats(1000)
        assert peak_of(meter, lambda: floats(10)) == 40
        del kept

    def test_end_without_start(self, meter: PeakMeter) -> None:
        peak = meter.end_step()
        assert (peak.peak_bytes, peak.method) == (None, "not measured: no step was started")
        assert peak.rss_peak_bytes > 0

    def test_a_device_without_a_method(self) -> None:
        with pytest.raises(UserError, match="not on 'meta'"):
            PeakMeter(torch.device("meta"))


class TestUsersProfiler:
    def test_a_running_profiler_is_left_alone(self, meter: PeakMeter, caplog: pytest.LogCaptureFixture) -> None:
        with torch.autograd.profiler.profile() as profiler, caplog.at_level(logging.WARNING):
            peaks = [run_step(meter, lambda: floats(10).add_(1)) for _ in range(2)]
        assert [peak.peak_bytes for peak in peaks] == [None, None]
        assert peaks[0].method.startswith("not measured: a torch profiler is in use")
        assert len(caplog.records) == 1
        assert [event.name for event in profiler.function_events].count("aten::add_") == 2
        assert peak_of(meter, lambda: floats(10)) == 40  # and afterwards there are figures again

    def test_a_scheduled_profiler_keeps_its_trace(self, meter: PeakMeter) -> None:
        names = []
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
            on_trace_ready=lambda profiler: names.extend(event.name for event in profiler.events()),
        ) as profiler:
            for _ in range(4):
                # Off in the first step, warming up in the second: it would lose its trace.
                assert run_step(meter, lambda: floats(10).add_(1)).peak_bytes is None
                profiler.step()
        assert names.count("aten::add_") == 1
        assert peak_of(meter, lambda: floats(10)) == 40

    def test_stopped_by_somebody_else(self, meter: PeakMeter) -> None:
        peak = run_step(meter, torch.autograd._disable_profiler)
        assert (peak.peak_bytes, peak.method) == (None, "not measured: the profiler was stopped during the step")


class TestResidentMemory:
    def test_peak_of_the_step(self, meter: PeakMeter) -> None:
        def touch(megabytes: int) -> None:
            torch.ones(megabytes << 20, dtype=torch.uint8)

        idle = run_step(meter, lambda: None)
        large = run_step(meter, lambda: touch(256))
        after = run_step(meter, lambda: None)
        assert large.rss_peak_bytes >= idle.rss_peak_bytes + (250 << 20)
        if after.rss_is_of_step:  # not every kernel sets its peak back
            assert after.rss_peak_bytes < large.rss_peak_bytes - (200 << 20)
        else:
            assert after.rss_peak_bytes >= large.rss_peak_bytes


@pytest.mark.gpu
class TestCuda:
    def test_the_allocators_peak(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        with PeakMeter(device) as meter:
            level = torch.cuda.memory_allocated(device)

            def step() -> None:
                a = torch.empty(1 << 20, dtype=torch.uint8, device=device)
                del a

            assert run_step(meter, step).peak_bytes == level + (1 << 20)
            assert run_step(meter, lambda: None).peak_bytes == level
