"""AdamW whose state lives in blocks of 32, 16, 8 or 4 bits.

optimizer = BlockAdamW(model.parameters(), lr=3e-4, bits=8)
optimizer.set_layout(parameter, layout)                  # bits for each block of 256 elements
torch.optim.AdamW(model.parameters()).load_state_dict(optimizer.full_precision_state())
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_adacc.codecs.options import Implementation, Rounding
from megatron_adacc.errors import UserError
from megatron_adacc.optim import master as masters
from megatron_adacc.optim.blocks import (
    Chunk,
    Layout,
    checked_layout,
    chunks,
    empty_state,
    flat_view,
    is_moment,
    put,
    same_layout,
    state_views,
    take,
)
from megatron_adacc.optim.checkpoint import adamw_state, loaded_state, moments_into, with_own_options
from megatron_adacc.optim.formats import BLOCK
from megatron_adacc.optim.offload import Place
from megatron_adacc.optim.options import check_group, option
from megatron_adacc.optim.random_words import key_tensor
from megatron_adacc.optim.transcode import read, transcode
from megatron_adacc.optim.update import Constants, update_float32, update_quantized

_IMPLEMENTATIONS = (Implementation.AUTO, Implementation.TORCH, Implementation.COMPILED)


class BlockAdamW(Optimizer):
    """AdamW (arXiv 1711.05101) with state in blocks; works where torch.optim.AdamW does.

    float32 parameters are updated in place. 16-bit parameters have float32 master weights: for bfloat16 as a 16-bit
    remainder (master.py), or in float32. Blocks of 32 bits get the bits of torch.optim.AdamW's state and update.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch.optim.AdamW's.
        amsgrad: refused; the name is here so that the refusal is a sentence.
        bits: of m and v each, until `set_layout` says otherwise: 32, 16, 8 or 4. May differ between groups.
        min_quantized_numel: parameters with fewer elements (biases, norms) start with 32 bits.
        master: "remainder" or "float32" for 16-bit parameters; "auto" takes the remainder where it is exact (bfloat16).
        rounding: "stochastic" or "nearest", of 16 bits and less. Nearest loses what moves v slowly (docs/states.md).
        seed: of stochastic rounding, which depends on it, the parameter's index, its step and the element.
        chunk_blocks: blocks decoded at a time; a step's workspace is a few float32 copies of them.
        implementation: "auto", "torch" or "compiled" (CPU).
        away: where m and v lie but for a parameter's update (offload.py); None leaves them on the device.

    Raises:
        UserError: an option that is not known or not possible.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        bits: int = 8,
        min_quantized_numel: int = 4096,
        master: str = "auto",
        rounding: Rounding | str = Rounding.STOCHASTIC,
        seed: int = 0,
        chunk_blocks: int = 1024,
        implementation: Implementation | str = Implementation.AUTO,
        away: Place | None = None,
    ) -> None:
        if chunk_blocks < 1:
            raise UserError(f"BlockAdamW works on at least one block at a time, but chunk_blocks is {chunk_blocks}.")
        self._stochastic = option("rounding", rounding, tuple(Rounding)) is Rounding.STOCHASTIC
        self._implementation = option("implementation", implementation, _IMPLEMENTATIONS)
        self._seed = seed
        self._chunk_blocks = chunk_blocks
        self._away = away
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "bits": bits,
            "min_quantized_numel": min_quantized_numel,
            "master": master,
        }
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        if self._away is not None:
            raise UserError(
                "An optimizer whose state is away cannot be copied or pickled: load its state_dict() into another one."
            )
        # Optimizer's own leaves out what it does not know, and copies would lack it.
        own = ("_stochastic", "_implementation", "_seed", "_chunk_blocks", "_away")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As Optimizer's.

        Raises:
            UserError: an option of the group, or a parameter in it, that this optimizer cannot serve.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except Exception:
            del self.param_groups[-1]
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group, parameter in self._numbered():
            if parameter.grad is not None:
                with self._whole_state(parameter, again=False) as state:
                    self._step_parameter(index, group, parameter, state)
        return loss

    @property
    def away(self) -> Place | None:
        """Where m and v lie but for a parameter's update; it knows what was copied."""
        return self._away

    def fetch_ahead(self, parameters: Sequence[Tensor]) -> None:
        """Begin to bring back m and v of these, which are updated next, and of no others. Returns at once."""
        if self._away is None:
            return
        wanted = dict.fromkeys(parameter for parameter in parameters if self._away.holds(parameter))
        for key in self._away.ahead():
            if key not in wanted:
                self._away.release(key)
        for parameter in wanted:
            self._away.fetch_ahead(parameter)

    def layout(self, parameter: Tensor) -> Layout:
        """Bits of each block, uint8 [blocks], or one int where all have the same."""
        return self._state_of(parameter)["layout"]

    @torch.no_grad()
    def set_layout(self, parameter: Tensor, layout: Layout) -> None:
        """Re-encode a parameter's state, to the nearest; blocks whose bits stay keep their codes.

        Args:
            layout: bits for all blocks, or an integer tensor [ceil(numel / 256)] of bits.

        Raises:
            UserError: unknown bits, or a wrong number of blocks.
        """
        new = checked_layout(layout.to(parameter.device) if isinstance(layout, Tensor) else layout, parameter.numel())
        old = self._state_of(parameter)["layout"]
        if same_layout(old, new):
            return
        with self._whole_state(parameter) as state:
            blocks = {name: state.pop(name) for name in list(state) if is_moment(name)}
            state.update(transcode(blocks, old, new, parameter.numel(), self._chunk_blocks, parameter.device))
            state["layout"] = new

    @torch.no_grad()
    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """AdamW's exp_avg and exp_avg_sq of a parameter, float32 of its shape and strides."""
        state = self._state_of(parameter)
        if self._away is not None and self._away.holds(parameter):
            state = {**state, **self._away.look(parameter)}
        m, v = (torch.empty_like(parameter, dtype=torch.float32) for _ in range(2))
        read(state, state["layout"], flat_view(m, parameter), flat_view(v, parameter), self._chunk_blocks)
        return m, v

    @torch.no_grad()
    def set_moments(self, parameter: Tensor, m: Tensor, v: Tensor) -> None:
        """Write AdamW's exp_avg and exp_avg_sq, of the parameter's shape, into its present layout.

        Raises:
            UserError: another shape.
        """
        with self._whole_state(parameter) as state:
            moments_into(state, parameter, m, v)

    @torch.no_grad()
    def master_weight(self, parameter: Tensor) -> Tensor:
        """The float32 weight of a parameter: a copy for 16-bit parameters, else the parameter's own memory."""
        if parameter.dtype is torch.float32:
            return parameter.detach()
        state = self._state_of(parameter)
        weight = torch.empty_like(parameter, dtype=torch.float32)
        if "remainder" in state:
            flat_view(weight, parameter).copy_(masters.join(flat_view(parameter), state["remainder"]))
        else:
            flat_view(weight, parameter).copy_(state["master"])
        return weight

    def state_bytes(self) -> int:
        """Bytes of all tensors it holds, on the device or away: state, exponents, layouts, master weights."""
        return self._bytes_beside() + sum(self.moment_bytes(parameter) for parameter in self.state)

    def device_bytes(self) -> int:
        """Of these, the bytes on the device: m and v that are away count where they are fetched ahead."""
        if self._away is None:
            return self.state_bytes()
        return self._bytes_beside() + sum(self._away.nbytes(key) for key in self._away.ahead())

    def moment_bytes(self, parameter: Tensor) -> int:
        """Of a parameter's m, v and exponents, wherever they lie; 0 before it has a state."""
        here = sum(value.nbytes for name, value in self.state.get(parameter, {}).items() if is_moment(name))
        return here if self._away is None else here + self._away.nbytes(parameter)

    def _bytes_beside(self) -> int:
        """Of the state other than m and v."""
        held = (item for state in self.state.values() for item in state.items() if not is_moment(item[0]))
        return sum(value.nbytes for _, value in held if isinstance(value, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """As Optimizer's. What is away is copied into host memory for it, and stays away."""
        result = super().state_dict()
        if self._away is not None:
            for index, _, parameter in self._numbered():
                if self._away.holds(parameter):
                    copies = {n: value.to("cpu", copy=True) for n, value in self._away.look(parameter).items()}
                    result["state"][index] = {**result["state"][index], **copies}
        return result

    def full_precision_state(self) -> dict[str, Any]:
        """A state dict of torch.optim.AdamW with m and v in float32; for 16-bit parameters of an AdamW over their
        master weights (`master_weight`). Another layout, another sharding, or AdamW itself continue from it."""
        return adamw_state(self)

    @torch.no_grad()
    def set_master_weight(self, parameter: Tensor, weight: Tensor) -> None:
        """Make float32 `weight` the master weight of a parameter, and its rounding the parameter.

        Raises:
            UserError: another shape.
        """
        if weight.shape != parameter.shape:
            raise UserError(
                f"A master weight of shape {tuple(weight.shape)} was given for a parameter of {tuple(parameter.shape)}."
            )
        state = self._state_of(parameter)
        value = flat_view(weight.to(parameter.device, torch.float32), parameter)
        flat = flat_view(parameter)
        if "remainder" in state:
            masters.split(value, flat, state["remainder"])
        else:
            flat.copy_(value)
            if "master" in state:
                state["master"].copy_(value)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict()` of this class bit for bit, or one of torch.optim.AdamW into the present layouts.

        Raises:
            UserError: a state of other parameters, or of another optimizer.
            ValueError: parameter groups of other sizes.
        """
        # Optimizer's own would cast every tensor to the parameter's dtype, codes too.
        layouts = {parameter: state["layout"] for parameter, state in self.state.items()}
        super().load_state_dict({"state": {}, "param_groups": with_own_options(state_dict, self.param_groups)})
        if self._away is not None:
            for parameter in layouts:
                self._away.forget(parameter)
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, (_, _, parameter) in zip(order, self._numbered(), strict=True):
            saved = state_dict["state"].get(number)
            if saved:
                self._state_of(parameter)
                if "exp_avg" in saved and parameter in layouts:
                    self.set_layout(parameter, layouts[parameter])
                with self._whole_state(parameter, again=False) as fresh:
                    self.state[parameter] = loaded_state(saved, parameter, fresh)

    def _numbered(self) -> Iterator[tuple[int, dict[str, Any], Tensor]]:
        pairs = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for index, (group, parameter) in enumerate(pairs):
            yield index, group, parameter

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if state:
            return state
        group = next((g for g in self.param_groups if any(parameter is p for p in g["params"])), None)
        if group is None:
            del self.state[parameter]
            raise UserError(f"A tensor of shape {tuple(parameter.shape)} is not a parameter of this optimizer.")
        numel = parameter.numel()
        layout = group["bits"] if numel >= group["min_quantized_numel"] else 32
        state.update(step=0, layout=layout, **empty_state(layout, numel, parameter.device))
        if parameter.dtype is not torch.float32:
            flat = flat_view(parameter.detach())
            if _remainder(group["master"], parameter):
                state["remainder"] = torch.zeros(numel, dtype=torch.int16, device=parameter.device)
            else:
                state["master"] = flat.to(torch.float32)
        self._put_away(parameter)
        return state

    @contextlib.contextmanager
    def _whole_state(self, parameter: Tensor, *, again: bool = True) -> Iterator[dict[str, Any]]:
        """A parameter's state with m and v in it; what is away goes back, and is fetched ahead `again` if it was."""
        state = self._state_of(parameter)
        if self._away is None:
            yield state
            return
        again = again and parameter in self._away.ahead()
        if self._away.holds(parameter):  # a place that was full did not take it
            state.update(self._away.get(parameter))
        try:
            yield state
        finally:
            self._put_away(parameter)
            if again:
                self._away.fetch_ahead(parameter)

    def _put_away(self, parameter: Tensor) -> None:
        if self._away is not None:
            state = self.state[parameter]
            moments = {name: value for name, value in state.items() if is_moment(name)}
            self._away.put_away(parameter, moments)
            for name in moments:  # only now: what a full place refused stays here
                del state[name]

    def _step_parameter(self, index: int, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        grad = parameter.grad
        assert grad is not None
        if grad.is_sparse:
            raise UserError("BlockAdamW does not take sparse gradients; build the embedding with sparse=False.")
        state["step"] += 1
        beta1, beta2 = group["betas"]
        constants = Constants(
            float(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"], state["step"]
        )
        on_device = constants.tensor(parameter.device)
        flat, flat_grad = flat_view(parameter), flat_view(grad, parameter)
        implementation = self._implementation
        if implementation is not Implementation.AUTO or parameter.device.type == "cpu":
            implementation = implementation.resolve(parameter.device)
        for chunk in chunks(state["layout"], parameter.numel(), self._chunk_blocks):
            weight = _weights(flat, state, chunk)
            gradient = take(flat_grad, chunk)
            gradient = -gradient if group["maximize"] else gradient
            views = state_views(state, chunk)
            if chunk.bits == 32:
                update_float32(weight, gradient.to(torch.float32), views[0], views[1], constants)
            else:
                key = None
                if self._stochastic:
                    # A sequence for each precision, by position among its blocks, whatever chunk_blocks is.
                    sequence, start = index * 64 + chunk.bits, chunk.first * BLOCK
                    key = key_tensor(self._seed, sequence, state["step"], start, parameter.device)
                update_quantized(weight, gradient, views, on_device, key, chunk.bits, implementation)
            _put_weights(flat, state, chunk, weight)


def _weights(flat: Tensor, state: dict[str, Any], chunk: Chunk) -> Tensor:
    """float32 weights of a chunk [count, width]: the parameter's memory where it is float32 and in one piece."""
    if "remainder" in state:
        return masters.join(take(flat, chunk), take(state["remainder"], chunk))
    return take(state.get("master", flat), chunk)


def _put_weights(flat: Tensor, state: dict[str, Any], chunk: Chunk, weight: Tensor) -> None:
    if "remainder" in state:
        parameter, remainder = take(flat, chunk), take(state["remainder"], chunk)
        masters.split(weight, parameter, remainder)
        put(state["remainder"], chunk, remainder)
        put(flat, chunk, parameter)
        return
    if "master" in state:
        put(state["master"], chunk, weight)
        if isinstance(chunk.rows, slice):
            take(flat, chunk).copy_(weight)
        weight = weight.to(flat.dtype)
    put(flat, chunk, weight)


def _remainder(master: str, parameter: Tensor) -> bool:
    return parameter.dtype is torch.bfloat16 and master != "float32"
