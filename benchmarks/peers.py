"""The plan "auto" beside other ways to save activation memory, each at the bytes that the other one needs.

    python benchmarks/peers.py [--layers 2 4] [--rounds 5] [--part eager] [--part compiled] [--hidden 512] ...

The stack of benchmarks/engine.py: GPT layers, fp32, unfused attention, one thread. The variants take turns in one
process, in the opposite order every other round, so that a slower minute of the machine slows all of them.

eager part, dropout 0.1
    plain        nothing
    checkpoint   torch.utils.checkpoint around each layer (use_reentrant=False), as Megatron's full recompute
    matmuls      the same with torch's selective checkpointing: the results of mm, addmm and bmm are saved
    linears      the same, mm and addmm saved
    core         the attention core (scores, softmax, dropout, context) checkpointed, as Megatron's selective recompute
    paper N%     the formulation of Adacc (one plan for all layers, no dependencies) at N % of plain's held bytes
    auto N%      our plan, at the same; auto = NAME held: at the bytes that NAME holds; auto = NAME peak: at its peak
compiled part, dropout 0 (with dropout the compiled gradients are wrong below budget 1)
    compiled B   torch.compile of each layer with torch._functorch.config.activation_memory_budget = B
    auto         at the bytes that these hold, and plain and checkpoint

Limits that have the same plan share one variant. All plans are solved from costs measured once, at the start, into a
cache of the run's own. cpu, wall, held, error: as in benchmarks/engine.py. peak: the largest sum of live tensor bytes
during forward and backward above what was live before, all gradients included. added: CPU seconds beyond plain's.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from engine import GptLayer, Variant, checkpointed, largest_error
from peers_report import Measured, prediction_lines, table_lines, verdict_lines
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_adacc import attach
from megatron_adacc.cost.cache import VARIABLE
from megatron_adacc.cost.limits import Limit
from megatron_adacc.cost.stage_plan import Prediction, Room, StagePlan, plain_bytes, plan_stage
from megatron_adacc.errors import UserError
from megatron_adacc.planner import Plan
from megatron_adacc.planner.paper import solve_paper
from megatron_adacc.planner.problem import Problem

PERCENTS = (5, 10, 25, 29, 50)
BUDGETS = (0.0, 0.25, 0.5, 0.75)
FORWARD_ENDED = "peers: forward ended"

LINEARS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
MATMULS = LINEARS | {torch.ops.aten.bmm.default}

Call = Callable[[nn.Module, Tensor], Tensor]


class CoreCheckpointed(GptLayer):
    """GptLayer with the part between query, key, value and the context checkpointed."""

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)) * (q.shape[-1] ** -0.5)
        probabilities = F.softmax(scores.masked_fill_(self.mask, -10000.0), dim=-1)
        return F.dropout(probabilities, self.dropout, self.training) @ v

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        context = checkpoint(self._core, q, k, v, use_reentrant=False)
        context = context.transpose(1, 2).reshape(batch, sequence, hidden)
        x = x + F.dropout(self.projection(context), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    result = layer(x)
    assert isinstance(result, Tensor)
    return result


def selective(saved: frozenset[Any], layer: nn.Module, x: Tensor) -> Tensor:
    """torch's selective checkpointing of the layer; the results of the ops in ``saved`` are saved."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return create_selective_checkpoint_contexts(policy)

    result = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    assert isinstance(result, Tensor)
    return result


def compiled(budget: float) -> Call:
    """Calls layers compiled with this activation memory budget."""

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        # A backend of its own: Dynamo would take what it compiled for another budget for the same.
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(module, inputs)

    function = torch.compile(plain, backend=backend)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        result = function(layer, x)
        assert isinstance(result, Tensor)
        return result

    return call


def eager_peers(stack: nn.ModuleList, options: argparse.Namespace) -> list[Variant]:
    # The stack has the weights; only the forward is another.
    core = nn.ModuleList(
        CoreCheckpointed(options.hidden, options.heads, options.sequence, options.dropout) for _ in stack
    )
    core.load_state_dict(stack.state_dict())
    return [
        Variant("plain", copy.deepcopy(stack), plain),
        Variant("checkpoint", copy.deepcopy(stack), checkpointed),
        Variant("matmuls", copy.deepcopy(stack), partial(selective, MATMULS)),
        Variant("linears", copy.deepcopy(stack), partial(selective, LINEARS)),
        Variant("core", core, plain),
    ]


def compiled_peers(stack: nn.ModuleList) -> list[Variant]:
    return [
        Variant("plain", copy.deepcopy(stack), plain),
        Variant("checkpoint", copy.deepcopy(stack), checkpointed),
        *(Variant(f"compiled {budget:g}", copy.deepcopy(stack), compiled(budget)) for budget in BUDGETS),
    ]


def memory(variant: Variant, x: Tensor) -> tuple[int, int]:
    """(held, peak) bytes of a step, counted from the allocations that the profiler reports.

    held: what the forward leaves behind with its output alive, without the output, with the layers' inputs."""
    variant.layers.zero_grad(set_to_none=True)
    x.grad = None
    torch.manual_seed(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = variant.forward(x)
        with torch.profiler.record_function(FORWARD_ENDED):
            pass
        output.square().mean().backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() in ("[memory]", FORWARD_ENDED)]
    live = highest = held = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == FORWARD_ENDED:
            held = live - output.untyped_storage().nbytes() + x.untyped_storage().nbytes()
        else:
            live += event.nbytes()
            highest = max(highest, live)
    return held, highest


def first_measured(variant: Variant, x: Tensor, kind: str, exact: Sequence[Tensor | None] | None) -> Measured:
    """Two steps: what traces, compiles or warms up, then one whose memory and gradients are looked at."""
    variant.step(x)
    held, peak = memory(variant, x)
    gradients = [p.grad for p in variant.layers.parameters()]
    error = 0.0 if exact is None else largest_error(gradients, list(exact))
    return Measured(variant.name, kind, held, peak, error)


def learned(stack: nn.ModuleList, x: Tensor) -> StagePlan:
    """What attach(plan="auto") learns about the stack and answers for half of the plain run's bytes."""
    layers = copy.deepcopy(stack)
    with attach(layers, "auto", limit="50%") as handle:
        Variant("auto", layers, plain).step(x)
        assert handle.stage is not None
        return handle.stage


def paper_plan(stage: StagePlan, percent: int) -> tuple[Plan, Prediction] | None:
    """The plan of the paper's formulation at a share of the plain run's bytes, from the same costs; None where it
    has none. Its peak is not predicted."""
    none = stage.predictions[0]
    classes = tuple(replace(fact.layer_class, in_flight=1) for fact in stage.facts)
    solution = solve_paper(Problem(classes, percent * plain_bytes(stage.facts) // 100, error_budget=0.0))
    if not solution.layers:
        return None
    plans = [fact.problem.layer_plan(solution.layers_of(i)[0].actions, None) for i, fact in enumerate(stage.facts)]
    promised = Prediction("paper", solution.held_bytes, 0, none.step_us + solution.cost_us)
    return Plan(tuple(plans), f"paper {percent}%"), promised


def limits(peers: Iterable[Measured], plain_held: int, percents: Sequence[int]) -> dict[str, Limit]:
    """The limits of auto by the variant's name."""
    found = {f"auto {percent}%": Limit(share=Fraction(percent, 100)) for percent in percents}
    for peer in peers:
        if peer.name != "plain":
            share = Fraction(min(peer.held, plain_held), plain_held)
            found[f"auto = {peer.name} held"] = Limit(share=share)
            found[f"auto = {peer.name} peak"] = Limit(total_bytes=peer.peak)
    return found


class Attached:
    """Variants with a plan; equal plans are one variant with several names."""

    def __init__(self, stack: nn.ModuleList) -> None:
        self._stack = stack
        self._known: dict[Plan, Variant] = {}
        self.names: dict[str, str] = {}  # every name -> that of the variant
        self.predictions: dict[str, Prediction] = {}  # by variant

    def add(self, name: str, plan: Plan, prediction: Prediction) -> None:
        bare = replace(plan, name="")
        if bare not in self._known:
            layers = copy.deepcopy(self._stack)
            self._known[bare] = Variant(name, layers, plain, attach(layers, plan))
        first = self._known[bare].name
        self.names[name] = first
        if first not in self.predictions or not self.predictions[first].peak_bytes:
            self.predictions[first] = prediction

    @property
    def variants(self) -> list[Variant]:
        return list(self._known.values())


def run_stack(layers: int, part: str, options: argparse.Namespace) -> list[str]:
    """All variants of one part on a stack of this many layers; the lines of its report."""
    torch.manual_seed(1)
    dropout = options.dropout if part == "eager" else 0.0
    stack = nn.ModuleList(GptLayer(options.hidden, options.heads, options.sequence, dropout) for _ in range(layers))
    x = torch.randn(options.batch, options.sequence, options.hidden, requires_grad=True)
    stage = learned(stack, x)
    variants = eager_peers(stack, options) if part == "eager" else compiled_peers(stack)
    exact: list[Tensor | None] | None = None
    found: dict[str, Measured] = {}
    for variant in variants:
        found[variant.name] = first_measured(variant, x, "peer", exact)
        if exact is None:
            exact = [None if p.grad is None else p.grad.clone() for p in variant.layers.parameters()]
    attached, notes = Attached(stack), []
    percents = options.percents if part == "eager" else []
    wanted = limits(found.values(), plain_bytes(stage.facts), percents)
    for name, limit in wanted.items():
        try:
            answer = plan_stage(stage.facts, limit, Room())
        except UserError as error:
            notes.append(f"{name}: {error}")
        else:
            attached.add(name, answer.plan, answer.predicted)
    for percent in percents:
        papers = paper_plan(stage, percent)
        if papers is None:
            notes.append(f"paper {percent}%: no plan fits.")
        else:
            attached.add(f"paper {percent}%", *papers)
    for variant in attached.variants:
        found[variant.name] = replace(
            first_measured(variant, x, "plan", exact), predicted=attached.predictions[variant.name]
        )
    everything = [*variants, *attached.variants]
    for number in range(options.rounds):
        for variant in everything if number % 2 == 0 else reversed(everything):
            found[variant.name].times.append(variant.step(x))
    if part == "eager" and percents:
        notes += verdict_lines(found, attached.names, percents)
    else:
        notes += verdict_lines(found, attached.names, ())
    title = f"## {layers} layers, dropout {dropout:g}, {options.rounds} rounds"
    return [
        title, "", *table_lines(found, attached.names), "",
        *prediction_lines(found, stage.predictions[0].step_us), "", *(f"- {note}" for note in notes), "",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("hidden", 512), ("heads", 8), ("sequence", 512), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dropout", type=float, default=0.1, help="of the eager part")
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--percents", type=int, nargs="*", default=list(PERCENTS))
    parser.add_argument("--part", choices=("eager", "compiled"), action="append", help="default: both")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    out = sys.stdout
    out.write(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, ")
    out.write(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before\n\n")
    with tempfile.TemporaryDirectory() as folder:
        # Prices of another day, when the machine was busier, are not to be compared with today's steps.
        os.environ[VARIABLE] = folder
        for layers in options.layers:
            for part in options.part or ("eager", "compiled"):
                out.write("\n".join(run_stack(layers, part, options)) + "\n")
                out.flush()
    out.write(f"load {os.getloadavg()[0]:.1f} after\n")


if __name__ == "__main__":
    main()
