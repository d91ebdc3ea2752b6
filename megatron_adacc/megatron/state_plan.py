"""--adacc-state-plan: Adam's state in blocks of fewer bits, in Megatron's loop (docs/states.md).

    full        Megatron as it is
    16, 8, 4    m and v of every block in so many bits
    auto        the bits of each block from its importance, within --adacc-state-limit; chosen anew in steps whose
                distances double

The state dict is that of torch.optim.AdamW, in float32: a checkpoint resumes without us, with other bits, and on other
ranks. What the ranks of a job hold alike must stay alike, so a tensor that tensor-parallel ranks or pipeline stages
share has 32 bits: their blocks would be chosen, or their random bits drawn, each by its own rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.console import say
from megatron_adacc.megatron.state_flags import UNIFORM, state_limit
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.formats import STATE_BITS
from megatron_adacc.optim.memory import training_bytes
from megatron_adacc.optim.policy import PrecisionPolicy
from megatron_adacc.optim.reorganise import apply, propose

FIRST_LOOK = 100  # steps: before, Adam's second moment says little of the Hessian


class StateAdamW(BlockAdamW):
    """BlockAdamW as Megatron's wrappers use it. ``shared``: parameters that other ranks hold as well, by other means
    than data parallelism. ``limit_bytes``: of m and v, None where the bits do not change."""

    def __init__(self, groups: Iterable[Any], bits: int, shared: set[int], limit_bytes: int | None, seed: int) -> None:
        self._shared, self._limit_bytes = shared, limit_bytes
        self._steps, self._next_look = 0, FIRST_LOOK
        super().__init__(groups, bits=bits, seed=seed)
        for parameter in self._all():
            self.prepare(parameter)

    def _all(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def prepare(self, parameter: Tensor) -> None:
        """Make the state that the first step would make: bytes are known from the start."""
        self._state_of(parameter)
        if id(parameter) in self._shared:
            self.set_layout(parameter, 32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; in some steps the bits of the blocks are chosen anew after it."""
        result = super().step(closure)
        self._steps += 1
        if self._limit_bytes is not None and self._steps >= self._next_look:
            self._next_look = 2 * self._steps
            self.reorganise()
        return result

    def reorganise(self) -> None:
        """Choose the bits of each block by what the state says now."""
        assert self._limit_bytes is not None
        names = {str(index): parameter for index, parameter in enumerate(self._all())}
        fixed: Mapping[str, int | list[int]] = {name: 32 for name, p in names.items() if id(p) in self._shared}
        apply(self, propose(self, names, self._limit_bytes, PrecisionPolicy(dict(fixed))))
        say(f"optimizer state after {self._steps} steps: {self.shares()}, {written_bytes(self.state_bytes())}")

    def shares(self) -> str:
        """How many of the blocks have how many bits."""
        counts = dict.fromkeys(STATE_BITS, 0)
        for parameter in self._all():
            layout = self.layout(parameter)
            if isinstance(layout, Tensor):
                for bits in STATE_BITS:
                    counts[bits] += int((layout == bits).sum())
            else:
                counts[layout] += -(-parameter.numel() // 256)
        total = max(1, sum(counts.values()))
        return ", ".join(f"{100 * n / total:.1f} % of blocks in {bits} bits" for bits, n in counts.items() if n)

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's."""
        return self.full_precision_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As BlockAdamW's; under a limit the bits are chosen anew from what was loaded."""
        super().load_state_dict(state_dict)
        self._steps = max((int(state["step"]) for state in self.state.values()), default=0)
        while self._next_look <= self._steps:
            self._next_look *= 2
        if self._limit_bytes is not None and self._steps >= FIRST_LOOK:
            self.reorganise()


class Exchange:
    """Gives Megatron's optimizers a StateAdamW in place of their own Adam."""

    def __init__(self, args: Namespace) -> None:
        self._args = args

    def __call__(self, made: Any) -> None:
        inner: Any = getattr(made, "optimizer", None)
        if not isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and type(inner).__name__ != "FusedAdam":
            return  # nothing to train on this rank
        groups = [dict(group) for group in inner.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        if not parameters:
            return
        # A float32 main copy does not have all attributes of the model's own parameter.
        own = dict(_copies(made))
        shared = {id(p) for p in parameters if self._is_shared(own.get(p, p))}
        static = sum(self._other_bytes(p) + 8 * p.numel() for p in parameters)
        bits, limit_bytes = self._bits(parameters, shared, static)
        optimizer = StateAdamW(groups, bits, shared, limit_bytes, self._args.seed)
        optimizer.defaults = inner.defaults
        made.optimizer = optimizer
        made.init_state_fn = _init_state
        now = sum(self._other_bytes(p) for p in parameters) + optimizer.state_bytes()
        say(
            f"optimizer state: {optimizer.shares()}; static bytes {written_bytes(now)} of {written_bytes(static)} "
            f"({now / static:.1%})"
        )

    def _is_shared(self, parameter: Tensor) -> bool:
        if getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False):
            return self._args.pipeline_model_parallel_size > 1
        sharded = getattr(parameter, "tensor_model_parallel", False)
        return self._args.tensor_model_parallel_size > 1 and not sharded

    def _other_bytes(self, parameter: Tensor) -> int:
        """Of parameter, gradient and main copy."""
        numel = parameter.numel()
        if not (self._args.fp16 or self._args.bf16):
            return 8 * numel
        gradient = 4 if self._args.accumulate_allreduce_grads_in_fp32 else 2
        return (2 + gradient + 4) * numel

    def _bits(self, parameters: list[Tensor], shared: set[int], static: int) -> tuple[int, int | None]:
        """Bits to begin with, and the limit of m and v."""
        plan = self._args.adacc_state_plan
        if plan in UNIFORM:
            return UNIFORM[plan], None
        limit = state_limit(self._args.adacc_state_limit)
        total = limit.total_bytes if limit.share is None else int(Fraction(limit.share) * static)
        assert total is not None
        for_state = total - sum(self._other_bytes(p) for p in parameters)
        needs = {bits: sum(_moment_bytes(p, bits, id(p) in shared) for p in parameters) for bits in STATE_BITS}
        for bits, needed in needs.items():
            if needed <= for_state:
                return bits, for_state
        least = min(needs.values()) + sum(self._other_bytes(p) for p in parameters)
        raise UserError(
            f"--adacc-state-limit {self._args.adacc_state_limit} is too little: with 4 bits everywhere the static "
            f"bytes are {written_bytes(least)}, {100 * least / static:.1f} % of those without a state plan."
        )


def _copies(made: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Float32 main copies of Megatron's mixed-precision wrapper, each with the model's parameter."""
    pairs = (getattr(made, name, ()) for name in ("fp32_from_float16_groups", "float16_groups"))
    for copies, originals in zip(*pairs, strict=True):
        yield from zip(copies, originals, strict=True)


def _moment_bytes(parameter: Tensor, bits: int, shared: bool) -> int:
    few = parameter.numel() < 4096  # as BlockAdamW's min_quantized_numel
    return training_bytes(parameter.numel(), torch.float32, 32 if few or shared else bits).moments


def _init_state(optimizer: StateAdamW, config: Any = None) -> None:
    """Megatron asks for it before it loads."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.prepare(parameter)
