"""A guard for gradients: a band for the norm, and what is done when it is left.

The band follows the logarithm of the global norm, as a running mean and variance (decay 0.98):

    upper edge = exp(mean + width max(deviation, log 1.1))

A step *stands out* if its norm is above the edge, or its loss more than 15 % above the running loss. Then

    clip      gradients are scaled to the upper edge, or for a loss jump to exp(mean), if they are above it
    recipe    gradients are scaled by 2^5 / max_grad_norm, max_grad_norm the largest norm of one parameter's gradient

and it is logged. The recipe's factor would enlarge gradients whose norms are all below 32; it is then left at 1 and
the log says so. What stands out moves the band only by its edge, so a lasting change is accepted in time and one
spike is not. A norm that is inf or NaN is logged and left to the caller, who skips the step.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.errors import UserError

logger = logging.getLogger(__name__)

RULES = ("clip", "recipe")
RECIPE_NORM = 2.0**5
LOSS_JUMP = 0.15
_DECAY = 0.98
_LEAST_DEVIATION = math.log(1.1)


@dataclass(frozen=True)
class Intervention:
    """A step that stood out.

    Attributes:
        norm: global norm before.
        edge: upper edge of the band; inf while it is not known.
        factor: what gradients were multiplied by; 1.0 where they were left.
        reason: "norm", "loss" or "not finite".
    """

    norm: float
    edge: float
    factor: float
    reason: str


@dataclass
class _Band:
    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    loss: float | None = None


class GradientGuard:
    """Looks at gradients after backward and before the optimizer's step.

    Args:
        rule: "clip" or "recipe".
        width: of the band in standard deviations.
        warmup_steps: steps that only teach the band.

    Raises:
        UserError: an option that is not known or not possible.
    """

    def __init__(self, rule: str = "clip", *, width: float = 3.0, warmup_steps: int = 20) -> None:
        if rule not in RULES:
            raise UserError(f"The guard's rule {rule!r} is not known; it is 'clip' or 'recipe'.")
        if width <= 0 or warmup_steps < 1:
            raise UserError(
                f"The guard needs a width above 0 and a warm-up of at least 1 step, but has {width} and {warmup_steps}."
            )
        self._rule = rule
        self._width = width
        self._warmup_steps = warmup_steps
        self._band = _Band()

    @torch.no_grad()
    def check(self, parameters: Iterable[Tensor], loss: float | None = None) -> Intervention | None:
        """Scale the gradients in place if this step stands out; what was done, or None.

        Args:
            parameters: those without a gradient are passed over.
            loss: of this step, if known.
        """
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms = (
            torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32).cpu() for grad in grads]).tolist()
            if grads
            else []
        )
        return self.check_norms(norms, grads, loss)

    @torch.no_grad()
    def check_norms(
        self, norms: Sequence[float], grads: Sequence[Tensor], loss: float | None = None
    ) -> Intervention | None:
        """The same for gradients of which this rank holds parts.

        Args:
            norms: of each parameter's whole gradient, alike on all ranks: then all ranks decide alike.
            grads: what is scaled, this rank's parts.
            loss: as for `check`; alike on all ranks.
        """
        norm = math.sqrt(math.fsum(value * value for value in norms))
        if not math.isfinite(norm) or (loss is not None and not math.isfinite(loss)):
            logger.warning("Gradient norm %g, loss %s: not finite; gradients are left, skip this step.", norm, loss)
            return Intervention(norm, self._edge(), 1.0, "not finite")
        if norm == 0.0:
            return None
        edge, centre = self._edge(), math.exp(self._band.mean)
        jumped = self._jumped(loss)
        reason = "norm" if norm > edge else "loss" if jumped else None
        self._learn(min(norm, edge), loss)
        if reason is None:
            return None
        if self._rule == "recipe":
            factor = min(1.0, RECIPE_NORM / max(norms))
        else:
            factor = min(1.0, (edge if reason == "norm" else centre) / norm)
        if factor != 1.0 and grads:
            torch._foreach_mul_(list(grads), factor)
        logger.warning(
            "Gradient norm %.4g, band up to %.4g, loss %s: %s stands out; gradients scaled by %.4g (%s).",
            norm,
            edge,
            loss,
            "the norm" if reason == "norm" else "the loss",
            factor,
            self._rule,
        )
        return Intervention(norm, edge, factor, reason)

    def state_dict(self) -> dict[str, Any]:
        """The band."""
        return asdict(self._band)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._band = _Band(**state)

    def _edge(self) -> float:
        if self._band.count < self._warmup_steps:
            return math.inf
        deviation = max(math.sqrt(self._band.variance), _LEAST_DEVIATION)
        return math.exp(self._band.mean + self._width * deviation)

    def _jumped(self, loss: float | None) -> bool:
        known = self._band.loss
        if loss is None or known is None or self._band.count < self._warmup_steps:
            return False
        return loss > known + LOSS_JUMP * abs(known)

    def _learn(self, norm: float, loss: float | None) -> None:
        band = self._band
        band.count += 1
        # A plain mean at first: a running one would remember its first value for 1 / (1 - decay) steps.
        share = max(1 - _DECAY, 1 / band.count)
        difference = math.log(norm) - band.mean
        band.mean += share * difference
        band.variance = (1 - share) * (band.variance + share * difference * difference)
        if loss is not None:
            band.loss = loss if band.loss is None else band.loss + share * (loss - band.loss)
