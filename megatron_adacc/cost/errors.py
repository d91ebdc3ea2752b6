"""What it costs in gradients to hold a buffer lossily: measured, in one layer, for one buffer at a time.

The layer runs forward once beside the training, with everything that autograd saves held. Then its backward runs
once exactly, and once for each way of holding a buffer, with the same random gradient of the layer's outputs; only
that buffer's saved tensors come from decode(encode(x)). With g_t the exact gradients, one tensor t for each trained
parameter and for each input that takes a gradient, and G_t the inexact ones,

    e = sqrt( mean over t of ( |G_t - g_t| / |g_t| )^2 )         Euclidean norms

that is |G - g| / |g| of all gradients as one vector, once each tensor is scaled to norm 1. Each counts alike, as it
does for an optimizer that scales each parameter's step by its own gradient (Adam): in a plain |G - g| / |g| the large
matrices would hide the norms' weights, and one input the parameters. e is a norm of the error, so the error of a plan
is to first order at most the sum of its buffers' e, and about the root of the sum of their squares where their
rounding errors are independent.

Not counted is a gradient that is zero but for rounding, such as that of a key projection's bias, which softmax does
not see: its error would be large and mean nothing. Such are those whose elements, as root of the mean square, are
below ROUNDING eps of that over the gradients of all parameters (for an input: of all inputs), with the eps of the
coarsest float dtype in the layer; measured in an attention layer: at most 2 eps.

Only the direct error is measured. In a plan in which other buffers are recomputed from a lossy one, its error spreads
to them; runtime/plan_error.py measures e for one layer under its whole plan, Handle.gradient_errors() each parameter's
error in a whole model.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_adacc.codecs import Codec
from megatron_adacc.cost.layer_problem import MIN_BYTES, Offer, held_anyway, offer
from megatron_adacc.cost.outliers import lossy_action
from megatron_adacc.cost.rehearsal import Call, Rehearsal
from megatron_adacc.cost.timeline import OtherSavesError
from megatron_adacc.graph.model import FLOAT_DTYPES, LayerGraph, Role
from megatron_adacc.graph.replay import Loader, base_of, torch_dtype
from megatron_adacc.graph.verify import Evidence, is_dense

ROUNDING = 8.0

Gradients = tuple[Sequence[Tensor | None], Sequence[Tensor | None]]  # of parameters, and of inputs

# By role, the one that attach(plan="compress") takes first. Statistics are small and enter everything; masks have a
# lossless codec.
LOSSY_CODECS: Mapping[Role, tuple[str, ...]] = MappingProxyType(
    {
        Role.LINEAR_INPUT: ("outlier_int4", "outlier_int8", "affine_int4", "outlier_int2"),
        Role.NORM_OUTPUT: ("outlier_int4", "outlier_int8", "outlier_int2"),
        Role.QUERY_KEY_VALUE: ("channel_int4", "group_int8", "group_int2"),
        Role.ATTENTION_PROBABILITIES: ("affine_int4", "group_int8", "group_int2"),
        Role.RESIDUAL: ("outlier_int4", "outlier_int8", "outlier_int2"),
        Role.OTHER: ("group_int4", "group_int8", "affine_int4", "group_int2"),
    }
)


def lossy_choices(graph: LayerGraph, evidence: Evidence, min_bytes: int = MIN_BYTES) -> tuple[Offer, ...]:
    """The lossy ways to hold the layer's saved buffers that make sense, without errors yet.

    Offered are float buffers that an op of the layer wrote, that cover their storage, in its last state, of at least
    ``min_bytes``; with the codecs of their role. Each buffer's first choice comes before any second one, and large
    buffers before small ones: who measures until the time is over has measured what matters most."""
    buffers = [b for b in graph.saved if _may_be_lossy(graph, evidence, b, min_bytes)]
    buffers.sort(key=lambda b: -graph.buffers[b].nbytes)
    columns = [
        [offer(graph, b, lossy_action(graph, evidence, b, name)) for name in LOSSY_CODECS[graph.role(b)]]
        for b in buffers
    ]
    return tuple(one for row in zip_longest(*columns) for one in row if one is not None)


def _may_be_lossy(graph: LayerGraph, evidence: Evidence, buffer: int, min_bytes: int) -> bool:
    found = graph.buffers[buffer]
    if held_anyway(graph, buffer, min_bytes) or buffer in evidence.two_valued or not graph.last_state(buffer):
        return False
    return is_dense(found) and found.base.dtype in FLOAT_DTYPES - {"float64"} and graph.role(buffer) in LOSSY_CODECS


def gradient_errors(
    graph: LayerGraph, rehearsal: Rehearsal, choices: Iterable[Offer], seconds: float = math.inf
) -> dict[tuple[int, str], float]:
    """The relative gradient error e of the module's formula with only the choice's buffer lossy, by the choice's
    buffer and label.

    Args:
        choices: measured in this order.
        seconds: no choice is begun when so much time has passed; those not measured are not in the result. Ranks
            that share the layer's collectives must measure alike: without a limit, and the same choices.

    A choice whose gradients are not finite is left out as well. Needs the bytes of all that the layer saves, of two
    sets of its gradients, and of the buffer's decoded copy.

    Raises OtherSavesError where the layer now saves other tensors than its graph says."""
    start = time.perf_counter()
    found: dict[tuple[int, str], float] = {}
    with _measuring(graph, rehearsal) as error_of:
        for choice in choices:
            if time.perf_counter() - start >= seconds:
                break
            error = error_of([choice])
            if math.isfinite(error):
                found[choice.buffer, choice.label] = error
    return found


def joint_error(graph: LayerGraph, rehearsal: Rehearsal, choices: Iterable[Offer]) -> float:
    """e of the module's formula with all these buffers lossy at once, each by its choice; direct errors only.
    Infinite where a gradient is not finite. Raises OtherSavesError as gradient_errors() does."""
    with _measuring(graph, rehearsal) as error_of:
        return error_of(list(choices))


@contextlib.contextmanager
def _measuring(graph: LayerGraph, rehearsal: Rehearsal) -> Iterator[Callable[[Sequence[Offer]], float]]:
    """Inside, what is yielded gives e for lossy buffers. The layer has run forward, and its backward runs again and
    again; where a part of it, compiled by torch.compile, runs backward only once, the forward is run again too."""
    with rehearsal.begin() as call, contextlib.suppress(_OnlyOnce):
        leaves = _Leaves(call)
        saved, loss = _forward(graph, call)
        exact = _Exact.of(leaves.gradients(loss, again=True), graph)

        def error_of(choices: Sequence[Offer]) -> float:
            with saved.lossy(choices):
                return exact.error_of(leaves.gradients(loss, again=True))

        yield error_of
        return

    def gradients(choices: Sequence[Offer]) -> Gradients:
        with rehearsal.begin() as call:
            leaves = _Leaves(call)
            saved, loss = _forward(graph, call)
            with saved.lossy(choices):
                return leaves.gradients(loss)

    found = _Exact.of(gradients([]), graph)
    yield lambda choices: found.error_of(gradients(choices))


class _OnlyOnce(Exception):
    """A part of the layer's backward cannot be run again."""


def _forward(graph: LayerGraph, call: Call) -> tuple[_SavedTensors, Tensor]:
    saved = _SavedTensors(graph)
    loss = call.forward(saved.pack, saved.unpack)
    saved.check()
    return saved, loss


@dataclass(frozen=True)
class Comparison:
    """``error``: e of the module's formula, infinite where a gradient is not finite. ``cosine``: of the angle between
    the two sets of gradients, each tensor scaled to norm 1 as in e; NaN where one is not finite."""

    error: float
    cosine: float


def beside_exact(graph: LayerGraph, rehearsal: Rehearsal, inexact: Callable[[Call], Tensor]) -> Comparison:
    """A whole call: ``inexact`` runs ``call.forward`` under hooks of its own, with the random numbers and the gradient
    of the outputs that the exact run has."""
    with rehearsal.begin() as call:
        exact = _Exact.of(_Leaves(call).gradients(call.forward(Tensor.detach, lambda tensor: tensor)), graph)
    with rehearsal.begin() as call:
        leaves = _Leaves(call)
        found = leaves.gradients(inexact(call))
        return Comparison(exact.error_of(found), exact.cosine_of(found))


@dataclass(frozen=True)
class _Saved:
    """What autograd holds in place of the n-th saved tensor."""

    index: int
    tensor: Tensor


class _SavedTensors:
    """Hooks that hold what the layer saves, and give one buffer back as a codec would."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._saved: list[_Saved] = []
        self._lossy: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> _Saved:
        index = len(self._saved)
        if index >= len(self._graph.packs) or tuple(tensor.shape) != self._graph.packs[index].view.size:
            raise OtherSavesError(
                f"a rehearsal saved a tensor of shape {tuple(tensor.shape)} as number {index}, its trace another"
            )
        self._saved.append(_Saved(index, tensor.detach()))
        return self._saved[-1]

    def unpack(self, saved: _Saved) -> Tensor:
        view = self._graph.packs[saved.index].view
        lossy = self._lossy.get(view.buffer)
        return saved.tensor if lossy is None else Loader.of(view, self._graph.buffers[view.buffer]).of_tensor(lossy)

    def check(self) -> None:
        if len(self._saved) != len(self._graph.packs):
            raise OtherSavesError(f"a rehearsal saved {len(self._saved)} tensors, its trace {len(self._graph.packs)}")

    @contextlib.contextmanager
    def lossy(self, choices: Sequence[Offer]) -> Iterator[None]:
        """Inside, unpack gives these buffers as their codecs decode them."""
        self._lossy = {choice.buffer: self._decoded(choice.buffer, choice.codec) for choice in choices}
        try:
            yield
        finally:
            self._lossy = {}

    def _decoded(self, buffer: int, codec: Codec) -> Tensor:
        pack = self._graph.packs[self._graph.packs_of(buffer)[0]]
        base = base_of(self._saved[pack.index].tensor, pack.view, self._graph.buffers[buffer])
        return codec.decode(codec.encode(base, codec.observe(base)))


class _Leaves:
    """Where the gradients of a call arrive: its trained parameters and its differentiable inputs."""

    def __init__(self, call: Call) -> None:
        self._trained = [p for p in call.parameters if p.requires_grad]
        self._inputs = [t for t in call.inputs if t.requires_grad]
        # Megatron's fused weight gradient is added to main_grad; .grad is missing then, or means nothing.
        self._fused: list[Any] = [p for p in self._trained if isinstance(getattr(p, "main_grad", None), Tensor)]
        for parameter in self._fused:
            parameter.main_grad = torch.zeros_like(parameter.main_grad)
        self._devices = {t.device for t in (*call.inputs, *call.parameters) if t.device.type == "cuda"}

    def gradients(self, loss: Tensor, again: bool = False) -> Gradients:
        """Run the backward; with ``again`` it can be run again."""
        self._clear()
        # The gradients of the outputs are drawn in the backward: each pass draws the same.
        with torch.random.fork_rng([d.index or 0 for d in self._devices]):
            try:
                loss.backward(retain_graph=again)
            except RuntimeError as error:
                if again and "donated buffer" in str(error):
                    raise _OnlyOnce from error
                raise
        found = [self._gradient(p) for p in self._trained], [t.grad for t in self._inputs]
        self._clear()
        return found

    def _gradient(self, parameter: Any) -> Tensor | None:
        fused = parameter.grad is None or getattr(parameter, "grad_added_to_main_grad", False)
        if fused and any(parameter is p for p in self._fused):
            return parameter.main_grad.clone()
        return parameter.grad

    def _clear(self) -> None:
        for leaf in (*self._trained, *self._inputs):
            leaf.grad = None
        for parameter in self._fused:
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False


@dataclass(frozen=True)
class _Exact:
    """The exact gradients that count, and their norms."""

    kept: tuple[tuple[int, int], ...]  # parameters or inputs, and place among them
    gradients: tuple[Tensor, ...]
    norms: tuple[float, ...]

    @staticmethod
    def of(gradients: Gradients, graph: LayerGraph) -> _Exact:
        dtypes = {torch_dtype(b.base.dtype) for b in graph.buffers if b.base.dtype in FLOAT_DTYPES}
        noise = ROUNDING * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
        kept, found, norms = [], [], []
        for kind, several in enumerate(gradients):
            present = [(i, g) for i, g in enumerate(several) if g is not None and g.numel()]
            sizes = _norms([g for _, g in present])
            elements = sum(g.numel() for _, g in present)
            typical = math.sqrt(sum(n * n for n in sizes) / elements) if elements else 0.0
            for (place, gradient), norm in zip(present, sizes, strict=True):
                if not norm <= noise * typical * math.sqrt(gradient.numel()):
                    kept.append((kind, place))
                    found.append(gradient)
                    norms.append(norm)
        return _Exact(tuple(kept), tuple(found), tuple(norms))

    def error_of(self, gradients: Gradients) -> float:
        """e of the module's formula; infinite where a gradient is missing or not finite."""
        measured = [gradients[kind][place] for kind, place in self.kept]
        if not measured:
            return 0.0
        if any(m is None for m in measured) or not all(map(math.isfinite, self.norms)):
            return math.inf
        differences = [m.float() - g.float() for m, g in zip(measured, self.gradients, strict=True) if m is not None]
        squares = [(d / norm) ** 2 for d, norm in zip(_norms(differences), self.norms, strict=True)]
        error = math.sqrt(sum(squares) / len(squares))
        return error if math.isfinite(error) else math.inf

    def cosine_of(self, gradients: Gradients) -> float:
        """See Comparison; 1 where no gradient counts."""
        measured = [gradients[kind][place] for kind, place in self.kept]
        if not measured:
            return 1.0
        products, squares = 0.0, 0.0
        for found, exact, norm in zip(measured, self.gradients, self.norms, strict=True):
            if found is None:
                return math.nan
            products += float((found.double() * exact.double()).sum()) / norm**2
            squares += float(found.double().square().sum()) / norm**2
        cosine = products / math.sqrt(squares * len(measured)) if squares else math.nan
        return cosine if math.isfinite(cosine) else math.nan


def _norms(tensors: Collection[Tensor]) -> list[float]:
    """Euclidean norms, summed in float64; one wait for the device."""
    if not tensors:
        return []
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return [float(n) for n in torch.stack(norms).cpu()]
