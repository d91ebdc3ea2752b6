"""How much an error in a block's state would cost: the diagonal of the Hessian, and the error of each precision.

With h the diagonal of the Hessian and u = m / sqrt(v) the direction of Adam's update, an error e of u changes the
loss, to second order and averaged over signs, by lr^2 / 2 sum h e^2. For h:

    second moment    v / (1 - beta2^t): the mean of squared gradients, the Fisher information's diagonal. Free.
    Hutchinson       mean over probes z = +-1 of  z * (H z)   (Yao et al., AdaHessian, arXiv 2006.00719). One
                     double backward a probe.

The squared error of u, with Q the largest |u| of the block (formats.py):

    16 bits    3e-4 u^2
     8         0.03 u^2                     0.02 as v wanders by its stochastic rounding, the rest by m's
     4         0.08 u^2 + 2.7 (Q / 7)^2     the same; and u^2 where s is below the last level

docs/states.md derives the shares of v; the rest was measured (benchmarks/states.py noise).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_adacc.errors import UserError
from megatron_adacc.optim.block_adamw import BlockAdamW
from megatron_adacc.optim.blocks import flat_view
from megatron_adacc.optim.formats import BLOCK

SHARES = {16: 3e-4, 8: 0.03, 4: 0.08}
"""Expected squared error of u relative to u^2, by bits; see the module docstring."""

STEP_SHARE = 2.7
"""Expected squared error of u at 4 bits relative to the squared distance of two codes of q."""

_RANGE = 2.0**-7  # the last of the 4-bit levels, of the first


def second_moment_diagonal(optimizer: BlockAdamW, parameter: Tensor) -> Tensor:
    """The Hessian's diagonal from Adam's second moment, float32 of the parameter's shape; zeros before any step."""
    _, v = optimizer.moments(parameter)
    step = optimizer.state[parameter]["step"]
    beta2 = next(g["betas"][1] for g in optimizer.param_groups if any(parameter is p for p in g["params"]))
    return v / (1 - float(beta2) ** step) if step else v


def hutchinson_diagonal(
    loss: Callable[[], Tensor], parameters: Sequence[Tensor], probes: int, *, seed: int = 0
) -> list[Tensor]:
    """The Hessian's diagonal by Hutchinson probes, of each parameter's shape and dtype; may be negative.

    Args:
        loss: computes the loss anew, with a graph that can be differentiated twice. Called once; it must not be
            under an attached plan, which refuses double backward where it is lossy.
        probes: the variance of the estimate falls with their number.

    Raises:
        UserError: probes < 1.
    """
    if probes < 1:
        raise UserError(f"Hutchinson's estimate needs at least one probe, but {probes} were asked for.")
    wanted = list(parameters)
    grads = torch.autograd.grad(loss(), wanted, create_graph=True, materialize_grads=True)
    generator = torch.Generator().manual_seed(seed)
    totals = [torch.zeros_like(parameter) for parameter in wanted]
    for probe in range(probes):
        signs = [_signs(parameter, generator) for parameter in wanted]
        products = torch.autograd.grad(
            grads, wanted, signs, retain_graph=probe + 1 < probes, allow_unused=True, materialize_grads=True
        )
        for total, sign, product in zip(totals, signs, products, strict=True):
            total.add_(sign * product, alpha=1 / probes)
    return totals


def block_sums(values: Tensor, parameter: Tensor) -> Tensor:
    """float64 [blocks]: the sum over each block of values that have the parameter's shape."""
    flat = flat_view(values, parameter)
    return _padded(flat).sum(1, dtype=torch.float64)


@torch.no_grad()
def layout_errors(
    optimizer: BlockAdamW, parameter: Tensor, diagonal: Tensor | None = None, *, chunk_blocks: int = 4096
) -> Tensor:
    """float64 [blocks, 4] for layout.choose: the importance-weighted error of each block at 32, 16, 8 and 4 bits.

    Args:
        diagonal: of the Hessian, of the parameter's shape; its magnitude counts. None: from the second moment.
        chunk_blocks: blocks looked at together.
    """
    m, v = (flat_view(moment, parameter) for moment in optimizer.moments(parameter))
    importance = flat_view(second_moment_diagonal(optimizer, parameter) if diagonal is None else diagonal, parameter)
    rows = []
    for start in range(0, m.numel(), chunk_blocks * BLOCK):
        part = slice(start, start + chunk_blocks * BLOCK)
        weight = _padded(importance[part]).abs().to(torch.float64)
        s = _padded(v[part]).sqrt()
        u = torch.where(s > 0, _padded(m[part]) / s, 0.0).to(torch.float64)
        below = s < s.amax(1, keepdim=True) * _RANGE
        largest = u.abs().amax(1, keepdim=True)
        square = u * u
        costs = [torch.zeros_like(square), square * SHARES[16], square * SHARES[8]]
        costs.append(torch.where(below, 1.0, SHARES[4]) * square + STEP_SHARE * (largest / 7) ** 2)
        rows.append(torch.stack([(weight * cost).sum(1) for cost in costs], 1))
    return torch.cat(rows) if rows else torch.empty(0, 4, dtype=torch.float64, device=m.device)


def _padded(flat: Tensor) -> Tensor:
    """[blocks, BLOCK], the last one filled up with zeros."""
    missing = -flat.numel() % BLOCK
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, BLOCK)


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    # Drawn on the CPU, so that a seed means the same probes on every device.
    return (torch.randint(0, 2, like.shape, generator=generator) * 2 - 1).to(like.device, like.dtype)
