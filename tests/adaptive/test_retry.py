"""A step that does not get its memory runs again under a tighter plan, with the gradients it would have had."""

import random

import numpy as np
import pytest
import torch
from drifting import HIDDEN, ROWS, Stack
from torch import Tensor

from megatron_adacc import enable_memory_optim
from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.adaptive.retry import TRIES, RandomStates, is_refused_memory
from megatron_adacc.errors import UserError
from megatron_adacc.runtime.stash import Stash

SETTINGS = {"plan": "auto", "limit": "60%"}


class Steps:
    """Steps of a training whose forward and backward run through handle.run()."""

    def __init__(self, handle: AdaptiveHandle, model: Stack) -> None:
        self.handle, self.model = handle, model
        self.attempts = 0
        self.held: list[object] = []

    def forward_backward(self) -> Tensor:
        self.attempts += 1
        loss = self.model(torch.randn(ROWS, HIDDEN, requires_grad=True) * float(np.random.rand() + random.random()))
        loss.backward()
        return loss.detach()

    def undo(self) -> None:
        self.model.zero_grad()

    def step(self) -> Tensor:
        """One step with plain gradient descent; gives its loss."""
        self.model.zero_grad()
        loss = self.handle.run(self.forward_backward, self.undo)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.05 * parameter.grad
        self.handle.step(loss)
        return loss


def seeded() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


def plain(steps: int) -> tuple[list[Tensor], Stack]:
    model = Stack()
    with enable_memory_optim(model, {"plan": "keep"}) as handle:
        seeded()
        losses = [Steps(handle, model).step() for _ in range(steps)]
    return losses, model


class Fault:
    """Refuses memory at the n-th tensor that is packed from now on, once or ``times`` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.times, self.packs = 0, 0, 0
        own = Stash.pack

        def pack(stash: Stash, tensor: Tensor) -> object:
            self.packs += 1
            if self.times:
                self.left -= 1
                if self.left <= 0:
                    self.times -= 1
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
            return own(stash, tensor)

        monkeypatch.setattr(Stash, "pack", pack)


def test_a_refusal_at_any_pack_of_a_step_changes_no_bit(monkeypatch):
    losses, expected = plain(3)
    fault = Fault(monkeypatch)
    n = packs = 0
    while n <= packs:
        n += 1
        model = Stack()
        with enable_memory_optim(model, SETTINGS) as handle:
            steps = Steps(handle, model)
            seeded()
            found = [steps.step()]
            before = fault.packs
            fault.left, fault.times = n, 1
            found.append(steps.step())
            packs = packs or fault.packs - before
            refused = fault.times == 0
            fault.times = 0
            found.append(steps.step())
            assert handle.stored_bytes() == 0
            assert steps.attempts == 3 + refused
            if refused:
                why = [line for decision in handle.decisions for line in decision.why if "loss" not in line]
                assert why == ["a step did not get its memory: CUDA out of memory. Tried to allocate 2.00 GiB."]
        assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True)), n
        for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(parameter, other), n
    assert packs > 8


def test_after_three_tries_the_run_stops_with_a_table(monkeypatch):
    fault = Fault(monkeypatch)
    model = Stack()
    with enable_memory_optim(model, {"plan": "auto", "limit": "100%"}) as handle:
        steps = Steps(handle, model)
        steps.step()
        fault.left, fault.times = 1, 100
        with pytest.raises(UserError) as raised:
            steps.step()
        fault.times = 0
    sentence, *table = str(raised.value).splitlines()
    assert sentence.startswith(f"Step 2 did not get its memory in {TRIES + 1} tries, each under a tighter plan, (CUDA")
    assert sentence.endswith("use a smaller micro-batch, or share the model by more ranks.")
    assert any(line.startswith("2 x Mlp (layers 0 to 1)") for line in table)
    assert steps.attempts == 1 + TRIES + 1


def test_each_try_has_less_memory(monkeypatch):
    fault = Fault(monkeypatch)
    model = Stack()
    with enable_memory_optim(model, {"plan": "auto", "limit": "100%"}) as handle:
        steps = Steps(handle, model)
        steps.step()
        held = [handle.stage.predicted.held_bytes]
        for _ in range(2):
            fault.left, fault.times = 3, 1
            steps.step()
            held.append(handle.stage.predicted.held_bytes)
    assert held[0] > held[1] > held[2]
    assert [d.why[0].startswith("a step did not get its memory") for d in handle.decisions] == [True, True]
    assert "ms a micro-batch, peak" in handle.report()


def test_a_plan_that_cannot_be_made_smaller_stops_at_once(monkeypatch):
    fault = Fault(monkeypatch)
    model = Stack()
    with enable_memory_optim(model, {"plan": "recompute"}) as handle:
        steps = Steps(handle, model)
        steps.step()
        fault.left, fault.times = 2, 1
        with pytest.raises(UserError, match=r"Step 2 did not get its memory \(CUDA out of memory"):
            steps.step()
        assert steps.attempts == 2


def test_what_the_layers_hold_beyond_the_limit_is_met_too():
    """On the CPU nobody refuses: the stash's account says it. Here somebody keeps the graphs of earlier forwards."""
    model = Stack()
    with enable_memory_optim(model, {"plan": "auto", "limit": "60%"}) as handle:
        steps = Steps(handle, model)
        steps.step()
        steps.step()
        assert handle.memory_excess() == 0
        stage = handle.stage
        assert stage is not None
        loss = model(torch.randn(ROWS, HIDDEN, requires_grad=True))
        assert handle.stored_bytes() == stage.predicted.held_bytes
        assert handle.memory_excess() == 0
        others = [model(torch.randn(ROWS, HIDDEN, requires_grad=True)) for _ in range(2)]
        assert handle.memory_excess() == 3 * stage.predicted.held_bytes - stage.limit_bytes
        del loss, others
        assert handle.memory_excess() == 0


def test_other_errors_pass():
    model = Stack()
    with enable_memory_optim(model, SETTINGS) as handle:

        def wrong() -> None:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            handle.run(wrong, lambda: None)


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("shapes"), False),
        (ValueError("memory"), False),
    ],
)
def test_what_counts_as_refused_memory(error, refused):
    assert is_refused_memory(error) == refused


def test_random_states_are_put_back():
    states = RandomStates()
    first = torch.rand(2), np.random.rand(), random.random()
    states.put_back()
    assert torch.equal(torch.rand(2), first[0])
    assert (np.random.rand(), random.random()) == first[1:]
