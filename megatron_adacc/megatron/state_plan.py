"""--adacc-state-plan: Adam's state in blocks of fewer bits, in Megatron's loop (docs/states.md).

    full        Megatron as it is; 32 bits everywhere where delayed groups or the guard ask for an optimizer of ours
    16, 8, 4    m and v of every block in so many bits
    auto        the bits of each block from its importance, within --adacc-state-limit; chosen anew in steps whose
                distances double. Without that limit its bytes are chosen with --adacc-plan auto (joint_states.py)

The state dict is that of torch.optim.AdamW, in float32: a checkpoint resumes without us, with other bits, and on other
ranks. What the ranks of a job hold alike must stay alike, so a tensor that tensor-parallel ranks or pipeline stages
share has 32 bits: their blocks would be chosen, or their random bits drawn, each by its own rank.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_adacc.cost.limits import written_bytes
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.console import say
from megatron_adacc.megatron.delayed import delay, guard, named
from megatron_adacc.megatron.joint_states import chosen_jointly, offer
from megatron_adacc.megatron.optim_settings import floors, without_parameters
from megatron_adacc.megatron.state_bytes import MIN_QUANTIZED, moment_bytes
from megatron_adacc.megatron.state_flags import UNIFORM, state_limit
from megatron_adacc.megatron.step_loss import StepLoss
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.dgr import DelayedGroups
from megatron_adacc.optim.formats import STATE_BITS
from megatron_adacc.optim.guard import GradientGuard
from megatron_adacc.optim.offload import Place, place_for
from megatron_adacc.optim.policy import PrecisionPolicy
from megatron_adacc.optim.reorganise import apply, propose
from megatron_adacc.runtime.state_offer import StateOffer

FIRST_LOOK = 100  # steps: before, Adam's second moment says little of the Hessian


class StateAdamW(BlockAdamW):
    """BlockAdamW as Megatron's wrappers use it. ``floors``: the fewest bits by id of a parameter, 4 where it is not
    named: 32 where other ranks hold it as well, by other means than data parallelism. ``limit_bytes``: of m and v, None
    where the bits do not change; or not yet: ``awaits_plan``, until :meth:`allow` is called."""

    def __init__(
        self,
        groups: Iterable[Any],
        bits: int,
        floors: Mapping[int, int],
        limit_bytes: int | None,
        seed: int,
        awaits_plan: bool = False,
        away: Place | None = None,
    ) -> None:
        self._awaits_plan = awaits_plan
        self._delayed: DelayedGroups | None = None
        self._guard: GradientGuard | None = None
        self._floors, self._limit_bytes = floors, limit_bytes
        self._steps, self._next_look = 0, FIRST_LOOK
        self._raise_at_next_step = False
        super().__init__(groups, bits=bits, seed=seed, away=away)
        for parameter in self.parameters():
            self.prepare(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As BlockAdamW's. The distributed optimizer's float32 shards are views of the model's parameters, which torch
        takes for results of a computation, unless the optimizer is said to be differentiable."""
        own = self.defaults
        self.defaults = {**own, "differentiable": True}
        try:
            super().add_param_group({"differentiable": False} | param_group)
        finally:
            self.defaults = own

    def parameters(self) -> list[Tensor]:
        """Of all groups: what is updated, float32 main copies or the model's own."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def limit_bytes(self) -> int | None:
        """Of m and v."""
        return self._limit_bytes

    def bits_of(self, parameter: Tensor, bits: int) -> int:
        """What the parameter has where all that may have `bits` have them; small ones have 32."""
        return bits_of(parameter, bits, self._floors)

    def bytes_in(self, bits: int) -> int:
        """Of m and v then."""
        return sum(moment_bytes(p.numel(), self.bits_of(p, bits)) for p in self.parameters())

    def layout_bytes(self) -> int:
        """Of the layouts where every parameter's blocks differ."""
        return sum(-(-p.numel() // 256) for p in self.parameters())

    @torch.no_grad()
    def allow(self, limit_bytes: int) -> None:
        """m and v may take so many bytes from now on. Fewer bits at once; more with the next step, when the
        activations, which share the device, are gone."""
        self._limit_bytes = limit_bytes
        if self.state_bytes() > limit_bytes:
            self._fit()
        else:
            self._raise_at_next_step = True

    def _fit(self) -> None:
        """The most uniform bits within the limit; after the first look, bits by block."""
        assert self._limit_bytes is not None
        self._raise_at_next_step = False
        if self._steps >= FIRST_LOOK:
            self.reorganise()
            return
        bits = next(b for b in STATE_BITS if self.bytes_in(b) <= self._limit_bytes or b == STATE_BITS[-1])
        for parameter in self.parameters():
            self.set_layout(parameter, self.bits_of(parameter, bits))
        say(f"optimizer state: {self.shares()}, {written_bytes(self.state_bytes())}")

    def prepare(self, parameter: Tensor) -> None:
        """Make the state that the first step would make: bytes are known from the start."""
        self._state_of(parameter)
        (group,) = (g for g in self.param_groups if any(parameter is p for p in g["params"]))
        self.set_layout(parameter, self.bits_of(parameter, group["bits"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; in some steps the bits of the blocks are chosen anew after it."""
        if self._raise_at_next_step:
            self._fit()
        result = super().step(closure) if self._delayed is None else self._delayed.step()
        self._steps += 1
        if self._limit_bytes is not None and self._steps >= self._next_look:
            self._next_look = 2 * self._steps
            self.reorganise()
        return result

    def reorganise(self) -> None:
        """Choose the bits of each block by what the state says now."""
        assert self._limit_bytes is not None
        if self.bytes_in(32) <= self._limit_bytes:  # nothing to choose, and no layouts to hold
            for parameter in self.parameters():
                self.set_layout(parameter, 32)
            return
        names = {str(index): parameter for index, parameter in enumerate(self.parameters())}
        # Small ones keep 32 bits: an update of few blocks costs its calls, many more than in 32 bits.
        fixed: dict[str, int | list[int]] = {name: self.bits_of(p, 4) for name, p in names.items()}
        apply(self, propose(self, names, self._limit_bytes, PrecisionPolicy(fixed)))
        say(f"optimizer state after {self._steps} steps: {self.shares()}, {written_bytes(self.state_bytes())}")

    def shares(self) -> str:
        """How many of the blocks have how many bits."""
        counts = dict.fromkeys(STATE_BITS, 0)
        for parameter in self.parameters():
            layout = self.layout(parameter)
            if isinstance(layout, Tensor):
                for bits in STATE_BITS:
                    counts[bits] += int((layout == bits).sum())
            else:
                counts[layout] += -(-parameter.numel() // 256)
        total = max(1, sum(counts.values()))
        return ", ".join(f"{100 * n / total:.1f} % of blocks in {bits} bits" for bits, n in counts.items() if n)

    def delay(
        self, groups: list[list[Parameter]], all_reduce: Callable[[Tensor], object] | None,
        counted: Callable[[Tensor], bool],
    ) -> None:  # fmt: skip
        """Update one of these groups a step; see DelayedGroups."""
        inner: Any = SimpleNamespace(
            param_groups=self.param_groups, step=super().step, fetch_ahead=self.fetch_ahead
        )  # fmt: skip
        self._delayed = DelayedGroups(inner, groups, all_reduce=all_reduce, counted=counted)

    def watch(self, guard: GradientGuard) -> None:
        """Save the guard's band with the state."""
        self._guard = guard

    def delayed_bytes(self) -> int:
        """At most, of the gradients that wait for their group's turn."""
        if self._delayed is None:
            return 0
        sizes = self._delayed.group_sizes()
        return 4 * (sum(sizes) - min(sizes))

    def most_device_bytes(self) -> int:
        """Of the state on the device at most: where it is put away, the largest group's."""
        if self.away is None or self._delayed is None:
            return self.state_bytes()
        by_group = [sum(self.moment_bytes(p) for p in group) for group in self._delayed.groups()]
        return self.state_bytes() - sum(by_group) + max(by_group)

    def exact_device_bytes(self) -> int:
        """The same with 32 bits everywhere, and layouts."""
        assert self._delayed is not None
        return 8 * max(self._delayed.group_sizes()) + self.layout_bytes()

    def state_dict(self) -> dict[str, Any]:
        """torch.optim.AdamW's, and what delayed groups and guard know beside it."""
        own = {name: one.state_dict() for name, one in (("groups", self._delayed), ("guard", self._guard)) if one}
        return {**self.full_precision_state(), **({"adacc": own} if own else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As BlockAdamW's; under a limit the bits are chosen anew, from what was loaded, with the next step."""
        if self._awaits_plan and self._limit_bytes is None:
            for parameter in self.parameters():  # nothing is lost before it is known what has to be
                self.set_layout(parameter, 32)
        super().load_state_dict(state_dict)
        own = state_dict.get("adacc", {})
        for name, one in (("groups", self._delayed), ("guard", self._guard)):
            if one is not None and name in own:
                one.load_state_dict(own[name])
        self._steps = max((int(state["step"]) for state in self.state.values()), default=0)
        while self._next_look <= self._steps:
            self._next_look *= 2
        # The distributed optimizer's moments come later.
        self._raise_at_next_step = self._limit_bytes is not None and self._steps >= FIRST_LOOK


class Exchange:
    """Gives Megatron's optimizers a StateAdamW in place of their own Adam."""

    def __init__(self, args: Namespace, loss: StepLoss | None = None) -> None:
        self._args, self._loss = args, loss
        self._made: list[StateAdamW] = []

    def offer(self, groups: Sequence[dist.ProcessGroup]) -> StateOffer:
        """What the activations' plan may count on; every rank of the groups calls it."""
        return offer(self._made, self._args, groups)

    def alone(self) -> None:
        """There is no plan of activations on this rank, which has no layers: the state keeps all bits."""
        if chosen_jointly(self._args):
            for optimizer in self._made:
                optimizer.allow(optimizer.bytes_in(32))

    def __call__(self, made: Any, chunks: Sequence[torch.nn.Module]) -> None:
        inner: Any = getattr(made, "optimizer", None)
        adam = isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) or type(inner).__name__ == "FusedAdam"
        groups = [dict(group) for group in inner.param_groups] if adam else []
        parameters = [parameter for group in groups for parameter in group["params"]]
        if not parameters:
            if self._args.adacc_dgr_group_size > 1 or self._args.adacc_gradient_guard is not None:
                raise UserError(
                    "--adacc-dgr-group-size and --adacc-gradient-guard need something to train on every rank, but this "
                    "one has nothing: leave them out, or divide the layers otherwise."
                )
            return
        # A float32 main copy does not have all attributes of the model's own parameter.
        own = dict(_copies(made))
        least = self._floors(parameters, own, chunks)
        others = self._other_bytes(made, parameters)
        static = others + sum(8 * p.numel() for p in parameters)
        bits, limit_bytes = self._bits(parameters, least, others, static)
        away = None
        if self._args.adacc_dgr_offload:
            away = place_for(parameters[0].device, self._args.adacc_dgr_offload_dir)
        optimizer = StateAdamW(groups, bits, least, limit_bytes, self._args.seed, chosen_jointly(self._args), away)
        optimizer.defaults = {**optimizer.defaults, **inner.defaults}
        made.optimizer = optimizer
        self._made.append(optimizer)
        made.init_state_fn = _init_state
        if self._args.adacc_dgr_group_size > 1:
            main = {id(original): copy for copy, original in own.items()}
            delay(optimizer, made, chunks, main, self._args.adacc_dgr_group_size)
            say(
                f"delayed updates in {self._args.adacc_dgr_group_size} groups: up to "
                f"{written_bytes(optimizer.delayed_bytes())} of gradients wait"
            )
        if self._args.adacc_gradient_guard is not None:
            assert self._loss is not None
            optimizer.watch(guard(made, optimizer, self._args.adacc_gradient_guard, self._loss.mean))
        now = others + optimizer.most_device_bytes()
        if away is not None:
            moments = sum(optimizer.moment_bytes(p) for p in optimizer.parameters())
            most = optimizer.most_device_bytes()
            say(f"state offload: at most {most:,} bytes on the device, {moments:,} {away.where}")
        say(
            f"optimizer state: {optimizer.shares()}, {optimizer.state_bytes():,} bytes; static bytes "
            f"{written_bytes(now)} of {written_bytes(static)} ({now / static:.1%})"
        )
        if parameters[0].device.type == "cpu" and bits != 32:
            say("optimizer state: the first step compiles the update, once for each precision")

    def _floors(
        self, parameters: Sequence[Tensor], own: Mapping[Tensor, Tensor], chunks: Sequence[torch.nn.Module]
    ) -> dict[int, int]:
        """The fewest bits by id; 32 for what tensor-parallel ranks or stages hold alike."""
        policy = getattr(self._args, "adacc_precision_policy", None)
        keys = {id(own.get(p, p)): id(p) for p in parameters}
        found = floors(policy, {name: keys[id(p)] for name, p in named(chunks).items() if id(p) in keys})
        for modality in without_parameters(policy):
            say(f"precision_policy: this model has no parameters of {modality!r}")
        return found | {id(p): 32 for p in parameters if self._is_shared(own.get(p, p))}

    def _is_shared(self, parameter: Tensor) -> bool:
        if getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False):
            return self._args.pipeline_model_parallel_size > 1
        sharded = getattr(parameter, "tensor_model_parallel", False)
        return self._args.tensor_model_parallel_size > 1 and not sharded

    def _other_bytes(self, made: Any, parameters: list[Tensor]) -> int:
        """Of parameters, gradients and main copies."""
        narrow = self._args.fp16 or self._args.bf16
        copies = 4 * sum(p.numel() for p in parameters) if narrow else 0
        if hasattr(made, "buffers"):  # the distributed optimizer: its parameters are this rank's shards
            return copies + sum(b.param_data.nbytes + b.grad_data.nbytes for b in made.buffers)
        gradient = 2 if narrow and not self._args.accumulate_allreduce_grads_in_fp32 else 4
        return copies + sum(((2 if narrow else 4) + gradient) * p.numel() for p in parameters)

    def _bits(
        self, parameters: list[Tensor], floors: Mapping[int, int], others: int, static: int
    ) -> tuple[int, int | None]:
        """Bits to begin with, and the limit of m and v."""
        plan = self._args.adacc_state_plan
        if plan == "full":
            return 32, None
        if plan in UNIFORM:
            return UNIFORM[plan], None
        if chosen_jointly(self._args):
            return STATE_BITS[-1], None  # the least until the plan of the activations is made
        limit = state_limit(self._args.adacc_state_limit)
        total = limit.total_bytes if limit.share is None else int(Fraction(limit.share) * static)
        assert total is not None
        for_state = total - others
        needs = {
            bits: sum(moment_bytes(p.numel(), bits_of(p, bits, floors)) for p in parameters) for bits in STATE_BITS
        }
        for bits, needed in needs.items():
            if needed <= for_state:
                return bits, for_state
        least = min(needs.values()) + others
        raise UserError(
            f"--adacc-state-limit {self._args.adacc_state_limit} is too little: with 4 bits everywhere the static "
            f"bytes are {written_bytes(least)}, {100 * least / static:.1f} % of those without a state plan."
        )


def _copies(made: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Float32 main copies of Megatron's mixed-precision wrapper, and shards of the distributed optimizer, each with the
    model's parameter."""
    for parameter, (group, place) in getattr(made, "model_param_group_index_map", {}).items():
        yield made.optimizer.param_groups[group]["params"][place], parameter
    pairs = (getattr(made, name, ()) for name in ("fp32_from_float16_groups", "float16_groups"))
    for copies, originals in zip(*pairs, strict=True):
        yield from zip(copies, originals, strict=True)


def bits_of(parameter: Tensor, bits: int, floors: Mapping[int, int]) -> int:
    """What a parameter has where all that may have `bits` have them."""
    return 32 if parameter.numel() < MIN_QUANTIZED else max(bits, floors.get(id(parameter), 4))


def _init_state(optimizer: StateAdamW, config: Any = None) -> None:
    """Megatron asks for it before it loads."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.prepare(parameter)
