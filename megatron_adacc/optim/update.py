"""AdamW's arithmetic on a chunk of blocks.

    p <- p (1 - lr decay);   m <- m + (1 - beta1) (g - m);   v <- beta2 v + (1 - beta2) g^2
    p <- p - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

(Loshchilov and Hutter, arXiv 1711.05101, as torch.optim.AdamW computes it.) float32 blocks go through the very
operations of torch's, one after the other, and get its bits. The others are decoded, updated and encoded by one
function, which torch.compile turns into a loop over the chunk; the update uses m and v before they are encoded.
"""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_adacc.codecs.options import Implementation
from megatron_adacc.optim.formats import decode, encode
from megatron_adacc.optim.random_words import words


@dataclass(frozen=True)
class Constants:
    """The numbers of one parameter's step.

    Attributes:
        lr, beta1, beta2, eps, weight_decay: of the parameter group.
        step: t, 1 for the first.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def step_size(self) -> float:
        """lr / (1 - beta1^t)."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """sqrt(1 - beta2^t)."""
        return float((1 - self.beta2**self.step) ** 0.5)

    def tensor(self, device: torch.device) -> Tensor:
        """float32 [7] for the quantized update, so that a new learning rate compiles nothing anew."""
        numbers = [
            1 - self.lr * self.weight_decay,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            1 / self.root_correction,
            self.eps,
            self.step_size,
        ]
        return torch.tensor(numbers, dtype=torch.float32, device=device)


def update_float32(weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, constants: Constants) -> None:
    """One step on float32 tensors of one shape, in place; bits of torch.optim.AdamW."""
    if constants.weight_decay != 0:
        weight.mul_(1 - constants.lr * constants.weight_decay)
    m.lerp_(grad, 1 - constants.beta1)
    v.mul_(constants.beta2).addcmul_(grad, grad, value=1 - constants.beta2)
    denominator = (v.sqrt() / constants.root_correction).add_(constants.eps)
    weight.addcdiv_(m, denominator, value=-constants.step_size)


def update_quantized(
    weight: Tensor,
    grad: Tensor,
    state: tuple[Tensor, ...],
    constants: Tensor,
    key: Tensor | None,
    bits: int,
    implementation: Implementation,
) -> None:
    """One step on float32 weights [blocks, width] and their state (formats.py), in place.

    `key`: int32 [3] of random_words for stochastic rounding; None rounds to the nearest.
    """
    function = functools.partial(_update, bits=bits, exponents=len(state) > 2)
    # torch.compile makes another version for one block, and tails are short: those are left to the plain function.
    if implementation is Implementation.COMPILED and weight.shape[0] > 1:
        compiled = _compiled(bits, grad.dtype, key is not None)
        if not compiled.called:  # for the compilation; a mark costs as much time as a thousand elements
            for tensor in (weight, grad, *state):
                torch._dynamo.mark_dynamic(tensor, 0)
        with torch.autocast("cpu", enabled=False, dtype=torch.bfloat16):
            compiled(weight, grad, *state, constants, key)
    else:
        function(weight, grad, *state, constants, key)


class _Compiled:
    """A compiled function, and whether it has run."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.called = False

    def __call__(self, *tensors: Tensor | None) -> None:
        self._function(*tensors)
        self.called = True


@functools.cache
def _compiled(bits: int, grad_dtype: torch.dtype, stochastic: bool) -> _Compiled:
    """_update compiled for one kind of arguments, under a code object of its own: compilations are limited by code
    object. Cached, because the result depends on the arguments alone."""

    def run(*tensors: Tensor | None) -> None:
        _update(*tensors, bits=bits, exponents=bits < 16)  # type: ignore[arg-type]

    name = f"_update_{bits}_{grad_dtype}_{stochastic}".replace(".", "_")
    own = types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__)
    return _Compiled(torch.compile(own, fullgraph=True, options={"cpp.dynamic_threads": True}))


def _update(
    weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, *rest: Tensor | None, bits: int, exponents: bool
) -> None:
    m_exponent, v_exponent = rest[:2] if exponents else (None, None)
    constants, key = rest[-2:]
    assert constants is not None
    decay, take_m, keep_v, take_v, per_root, eps, step_size = constants.unbind(0)
    m_value, v_value = decode(bits, m, v, m_exponent, v_exponent, weight.shape[1])
    gradient = grad.to(torch.float32)
    m_value = m_value + take_m * (gradient - m_value)
    v_value = keep_v * v_value + take_v * (gradient * gradient)
    update = m_value / (torch.sqrt(v_value) * per_root + eps)
    weight.copy_(weight * decay - step_size * update)
    encode(bits, m_value, v_value, m, v, m_exponent, v_exponent, None if key is None else words(key, weight.shape))
