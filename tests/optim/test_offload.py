"""m and v away from the device between updates: the bits of training with them on it, and a G-th of the memory."""

import contextlib
import copy
import errno
import itertools
import os
import sys
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_adacc.errors import UserError
from megatron_adacc.optim import BlockAdamW, offload_file
from megatron_adacc.optim.dgr import DelayedGroups
from megatron_adacc.optim.offload import Place, place_for
from megatron_adacc.optim.offload_cuda import PinnedPlace
from megatron_adacc.optim.offload_file import FilePlace
from megatron_adacc.optim.reorganise import apply, propose

SHAPES = [(40, 35), (9,), (700,), (30, 30), (0, 4), (513,)]
CPU = torch.device("cpu")


def fresh(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


class Run:
    """Parameters, optimizer and groups, which stand in the order of the parameters."""

    def __init__(self, count: int, away: Place | None = None, dtype: torch.dtype = torch.float32, **options) -> None:
        self.parameters = fresh(dtype)
        options = {"bits": 8, "min_quantized_numel": 100, "implementation": "torch", "lr": 1e-2, **options}
        self.optimizer = BlockAdamW(self.parameters, away=away, **options)
        ends = [round(len(SHAPES) * index / count) for index in range(count + 1)]
        self.members = [self.parameters[a:b] for a, b in itertools.pairwise(ends)]
        self.groups = DelayedGroups(self.optimizer, self.members)

    def step(self, number: int) -> None:
        """One of the parameters has no gradient for some steps, nor any when its group is due; one step is skipped, as
        for an inf."""
        generator = torch.Generator().manual_seed(number)
        for index, parameter in enumerate(self.parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if number in (2, 5, 6, 7, 8) and index == 3 else gradient
        if number != 4:
            self.groups.step()

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.step(number)

    def moments_of(self, group: int) -> int:
        return sum(self.optimizer.moment_bytes(parameter) for parameter in self.members[group])


def assert_same(one: Run, other: Run) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))
    first, second = (run.optimizer.full_precision_state()["state"] for run in (one, other))
    assert first.keys() == second.keys()
    for number, state in first.items():
        assert all(torch.equal(state[name], second[number][name]) for name in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("count", [2, 3])
def test_away_changes_no_bit_and_a_step_moves_one_group(bits, count, dtype):
    place = FilePlace()
    plain, away = Run(count, bits=bits, dtype=dtype), Run(count, place, bits=bits, dtype=dtype)
    idle = []
    for number in range(2 * count + 4):
        turn, out, back = away.groups.state_dict()["step"], place.bytes_out, place.bytes_in
        plain.step(number)
        away.step(number)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters, away.parameters, strict=True))
        if number == 4 or turn < count:
            continue  # nothing moves in a step that is skipped; in the first turn the state is made
        updated = [p for p in away.members[turn % count] if p.grad is not None]
        idle.append(len(updated) < len(away.members[turn % count]))
        assert place.bytes_out - out == sum(map(away.optimizer.moment_bytes, updated))
        assert place.bytes_in - back == away.moments_of((turn + 1) % count)
        beside = away.optimizer.state_bytes() - sum(map(away.moments_of, range(count)))  # master weights, remainders
        assert away.optimizer.device_bytes() == beside + away.moments_of((turn + 1) % count)
    assert set(idle) == {True, False}
    assert away.optimizer.state_bytes() == plain.optimizer.state_bytes() == plain.optimizer.device_bytes()
    assert_same(plain, away)


def test_memory_of_one_group_serves_all(monkeypatch):
    """What is alive, at each copy, of all that was ever copied: the next group comes when the last one has gone."""
    seen: dict[int, tuple[StorageWeakRef, int]] = {}
    alive: list[int] = []
    copy_bytes = offload_file._all_bytes

    def watch(call, tensor: Tensor, offset: int, folder: str) -> None:
        storage = tensor.untyped_storage()
        gone = [key for key, (one, _) in seen.items() if one.expired()]
        for key in gone:
            del seen[key]
        seen[storage._cdata] = StorageWeakRef(storage), tensor.nbytes
        alive.append(sum(nbytes for _, nbytes in seen.values()))
        copy_bytes(call, tensor, offset, folder)

    monkeypatch.setattr(offload_file, "_all_bytes", watch)
    run = Run(3, FilePlace(), bits=32)
    run.steps(range(12))
    assert run.optimizer.away is not None
    run.optimizer.away.look(run.parameters[5])  # of the group that was fetched last: all copies are done
    assert max(alive) == max(map(run.moments_of, range(3)))


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("bits", "full_precision"), [(32, False), (32, True), (8, False)])
def test_a_checkpoint_goes_on_on_either_side(bits, full_precision, first, second):
    whole, stopped = Run(3, bits=bits), Run(3, FilePlace() if first else None, bits=bits)
    whole.steps(range(12))
    stopped.steps(range(5))
    before = stopped.optimizer.device_bytes()
    saved = stopped.optimizer.full_precision_state() if full_precision else stopped.optimizer.state_dict()
    saved = copy.deepcopy((saved, stopped.groups.state_dict(), stopped.parameters))
    assert stopped.optimizer.device_bytes() == before
    stopped.steps(range(5, 8))  # what was saved is not touched
    resumed = Run(3, FilePlace() if second else None, bits=bits)
    for parameter, value in zip(resumed.parameters, saved[2], strict=True):
        parameter.data.copy_(value)
    resumed.steps(range(1))  # what it had is gone
    for parameter, value in zip(resumed.parameters, saved[2], strict=True):
        parameter.data.copy_(value)
    resumed.optimizer.load_state_dict(saved[0])
    resumed.groups.load_state_dict(saved[1])
    resumed.steps(range(5, 12))
    assert_same(whole, resumed)


def test_layouts_and_moments_are_changed_where_they_lie():
    plain, away = Run(2), Run(2, FilePlace())
    for run in (plain, away):
        run.steps(range(6))
        held = run.optimizer.device_bytes()
        for index in (0, 5):  # one of the group that is due, one of the other
            mixed = torch.tensor([32, 4, 8, 16])[torch.arange(-(-run.parameters[index].numel() // 256)) % 4]
            run.optimizer.set_layout(run.parameters[index], mixed)
            if run.optimizer.away is not None:
                assert (run.parameters[index] in run.optimizer.away.ahead()) == (index == 5)
        names = {str(index): parameter for index, parameter in enumerate(run.parameters)}
        apply(run.optimizer, propose(run.optimizer, names, 6000))
        m, v = run.optimizer.moments(run.parameters[2])
        run.optimizer.set_moments(run.parameters[2], 2 * m, v)
        with pytest.raises(UserError, match="has shape"):
            run.optimizer.set_moments(run.parameters[2], m[:-1], v)
        if run is away:
            assert run.optimizer.device_bytes() < held
        run.steps(range(6, 12))
    assert_same(plain, away)


def test_an_optimizer_without_groups_fetches_each_parameter_in_turn():
    one, other = Run(1), Run(1, FilePlace())
    for run in (one, other):
        run.steps(range(5))
    assert_same(one, other)
    assert other.optimizer.device_bytes() == 0


# ---- what can go wrong ----


def test_folders_and_devices_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match=r"No file for the optimizer's state can be made in .*absent: No such file"):
        place_for(CPU, str(tmp_path / "absent"))
    assert isinstance(place_for(CPU, str(tmp_path)), FilePlace)
    assert not list(tmp_path.iterdir())  # a killed process leaves nothing
    with pytest.raises(UserError, match="a GPU's host keeps in pinned memory: leave it out"):
        place_for(torch.device("cuda"), str(tmp_path))
    with pytest.raises(UserError, match="from a CUDA device or from the CPU, but not from meta"):
        place_for(torch.device("meta"))
    with pytest.raises(UserError, match="state is on meta, but the place for it is made for cpu"):
        FilePlace().put_away("key", {"m32": torch.zeros(4, device="meta")})
    with pytest.raises(UserError, match=r"cannot be copied or pickled: load its state_dict\(\)"):
        copy.deepcopy(Run(2, FilePlace()).optimizer)


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_from_the_start(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"does not get into its file in .*No space left on device; name a folder with"):
        Run(2, FilePlace()).steps(range(2))


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_later(call, monkeypatch):
    """Nothing goes on with half a state: it stays an error."""
    run = Run(2, FilePlace())
    run.steps(range(4))
    monkeypatch.setattr(os, call, full)
    for _ in range(2):
        with pytest.raises(UserError, match="No space left on device"):
            run.steps(range(6, 9))
    monkeypatch.undo()
    with pytest.raises(UserError, match="No space left on device"):
        run.optimizer.state_dict()


def test_what_was_not_written_is_not_read(monkeypatch):
    """Asked for before it was known that the disk is full."""
    place, asked = FilePlace(), threading.Event()
    place.put_away("key", {"m32": torch.zeros(4)})
    place.get("key")

    def full_later(*_: object) -> int:
        asked.wait(10)
        return full()

    monkeypatch.setattr(os, "pwrite", full_later)
    place.put_away("key", {"m32": torch.ones(4)})
    place.fetch_ahead("key")
    asked.set()
    with pytest.raises(UserError, match="No space left on device"):
        place.get("key")


def test_what_a_full_disk_refused_is_still_there(monkeypatch):
    """A layout of more bits asks for more room; the moments are in memory then, and the next step has them."""
    run, exact = Run(2, place_for(CPU)), Run(2)
    for one in (run, exact):
        one.steps(range(3))
    parameter = run.parameters[0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UserError, match="does not get into its file"):
            run.optimizer.set_layout(parameter, 32)
    exact.optimizer.set_layout(exact.parameters[0], 32)
    assert run.optimizer.state_bytes() == exact.optimizer.state_bytes()
    assert {"m32", "v32"} <= set(run.optimizer.state_dict()["state"][0])
    assert all(map(torch.equal, run.optimizer.moments(parameter), exact.optimizer.moments(exact.parameters[0])))
    for one in (run, exact):
        one.steps(range(3, 9))
    assert_same(run, exact)


def test_a_state_dict_that_is_refused_changes_nothing():
    run, exact = Run(2, place_for(CPU)), Run(2)
    for one in (run, exact):
        one.steps(range(3))
    state = run.optimizer.state_dict()
    short = {"state": state["state"], "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
    with pytest.raises(ValueError, match="parameter group"):
        run.optimizer.load_state_dict(short)
    for one in (run, exact):
        one.steps(range(3, 9))
    assert_same(run, exact)


def test_a_file_that_has_lost_its_end():
    place = FilePlace()
    place.put_away("key", {"m32": torch.ones(5000)})
    place.look("key")
    os.ftruncate(place._descriptor, 4096)
    with pytest.raises(UserError, match="has lost its end: start from a checkpoint"):
        place.get("key")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended():
    run = Run(2, FilePlace())
    run.steps(range(3))
    place = run.optimizer.away
    assert isinstance(place, FilePlace)
    place._thread.do(sys.exit)
    with pytest.raises(UserError, match="The thread that copies the optimizer's state has ended, so the state cannot"):
        run.steps(range(6, 9))


def test_the_thread_ends_with_its_place():
    place = FilePlace()
    thread = place._thread._thread
    place.put_away("key", {"m32": torch.ones(5000)})
    del place
    thread.join(10)
    assert not thread.is_alive()
    assert threading.current_thread().is_alive()


def test_room_in_the_file_is_used_again():
    place = FilePlace()
    for size in (1000, 5000, 1000, 5000, 9000, 5000):
        place.put_away("key", {"m32": torch.ones(size)})
        place.get("key")
    place.put_away("other", {"m32": torch.ones(1000)})
    assert place._end == 4096 + 20480 + 36864  # the rounded sizes; "other" lies where "key" was at first


# ---- the place of a GPU, without a GPU ----


def test_free_neighbours_in_the_file_are_one_place():
    place = FilePlace()
    for key in range(3):
        place.put_away(key, {"m": torch.full((1024,), float(key))})
    end = place._end
    for key in range(2):
        place.forget(key)
    place.put_away("large", {"m": torch.full((2000,), 7.0)})  # not on the one page that either had
    place.put_away("small", {"m": torch.full((8,), 8.0)})
    assert (place._end, place._free) == (end + 4096, [])
    found = [place.get(key)["m"] for key in ("large", "small", 2)]
    assert [(tensor.numel(), set(tensor.tolist())) for tensor in found] == [(2000, {7.0}), (8, {8.0}), (1024, {2.0})]


class Stream:
    """Does nothing until somebody waits for it, as a stream may. ``main``: None for the stream that torch is on."""

    def __init__(self, main: "Stream | None" = None) -> None:
        self.main = main
        self.work: list = []
        self.updates, self.seen = 0, 0

    def wait_stream(self, other: "Stream") -> None:
        self.seen = other.updates

    def record_event(self) -> list:
        return list(self.work)

    def wait_event(self, event: list) -> None:
        for one in event:
            one()


class FakeCuda:
    """Streams in place of torch.cuda's. A copy on the side stream is made when an event behind it is waited for, and
    not before; one that does not wait for the last update is an error."""

    def __init__(self, monkeypatch) -> None:
        self.main = Stream()
        self.side: Stream | None = None
        self.recorded: list[Stream] = []
        self.pinned: list[Tensor] = []
        plain = Tensor.copy_

        def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if self.side is None:
                return plain(target, source)
            assert non_blocking
            if any(target is kept for kept in self.pinned):
                assert self.side.seen == self.main.updates
            done: list[bool] = []

            def once() -> None:
                if not done:
                    done.append(True)
                    plain(target, source)

            self.side.work.append(once)
            return target

        monkeypatch.setattr(Tensor, "copy_", copy_)
        monkeypatch.setattr(Tensor, "record_stream", lambda one, stream: self.recorded.append(stream))
        monkeypatch.setattr(PinnedPlace, "_pinned", lambda place, tensor: self.keep(torch.empty_like(tensor)))

    def keep(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor)
        return tensor

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self.main)

    def current_stream(self, device: torch.device) -> Stream:
        return self.main

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        self.side = stream
        yield
        self.side = None


@pytest.mark.parametrize("bits", [32, 8])
def test_copies_of_a_gpu_wait_for_the_update_and_are_waited_for(bits, monkeypatch):
    """That the order suffices on a GPU, and what memory is used again when, this does not show."""
    plain = Run(3, bits=bits)
    plain.steps(range(10))
    cuda = FakeCuda(monkeypatch)
    place = PinnedPlace(CPU, cuda)
    away = Run(3, place, bits=bits)
    for number in range(10):
        cuda.main.updates += 1
        away.step(number)
        assert away.optimizer.device_bytes() == away.moments_of((away.groups.state_dict()["step"]) % 3)
    assert set(cuda.recorded) == {place._stream}  # memory is handed back when the side stream is done with it
    assert_same(plain, away)
    assert cuda.recorded[-1] is cuda.main  # and what was only looked at, when the main stream is
