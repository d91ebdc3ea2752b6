"""The layers of a training job, traced as on a CUDA device that is not there.

    with open_stage(Settings(flags)) as stage:          # nothing is allocated, no GPU and no other rank is needed
        for layers in stage.layers:
            print(layers.count, layers.graph)
            layers.call.forward(*layers.call.args, **layers.call.kwargs)

A pipeline stage is built by Megatron's own builder with fake parameters, and its forward runs once with the layers
left out, to see how each is called and what the rest of the stage keeps. Then one layer of each class is traced until
two traces agree, as in training.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_adacc.devices.absent import absent_cuda
from megatron_adacc.errors import UserError
from megatron_adacc.graph.model import LayerGraph, Origin
from megatron_adacc.graph.prove import prove, same_program
from megatron_adacc.graph.serialize import fingerprint
from megatron_adacc.graph.storages import call_tensors, flatten_tensors
from megatron_adacc.graph.tracer import Traced, Tracer
from megatron_adacc.graph.verify import Evidence, unverified
from megatron_adacc.megatron import launch, offline_flags
from megatron_adacc.megatron.offline_ranks import lone_rank
from megatron_adacc.runtime.key import LiveState, arguments_key, class_key, numbering_attributes

_MAX_TRACES = 4


@dataclass(frozen=True)
class Settings:
    """What to plan for. `flags`: Megatron's, of the whole job (trace_flags.flags_of_file reads a config).
    `world_size`: ranks of the job, None for one copy of the model; it is told to Megatron's arguments only, since no
    layer depends on data parallelism. The device is given by its compute capability and bytes."""

    flags: Sequence[str]
    pipeline_rank: int = 0
    tensor_rank: int = 0
    world_size: int | None = None
    capability: tuple[int, int] = (7, 0)
    memory_bytes: int = 32 * 2**30


@dataclass(frozen=True)
class Call:
    """A module and the arguments that training calls it with; ``forward(*args, **kwargs)`` runs it. It can be run
    inside ``open_stage`` only."""

    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Layers:
    """The layers of one class in one model chunk of the stage. ``places`` count the stage's layers from 0, in the
    order in which they are attached; ``evidence`` is not verified, since nothing was computed; ``objects``: what the
    graph's arguments stand for, process groups and the like."""

    chunk: int
    places: tuple[int, ...]
    graph: LayerGraph
    evidence: Evidence
    call: Call
    objects: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def shared(self) -> tuple[int, ...]:
        """Saved buffers that are one for all layers: arguments other than the hidden states, such as an attention
        mask, and what the first layer makes for all."""
        hidden = self.graph.inputs[0].buffer
        buffers = dict.fromkeys(p.view.buffer for p in self.graph.packs)
        return tuple(
            b
            for b in buffers
            if self.graph.buffers[b].origin == Origin.CONSTANT
            or (self.graph.buffers[b].origin == Origin.INPUT and b != hidden)
        )

    @property
    def shared_bytes(self) -> int:
        return sum({self.graph.buffers[b].storage: self.graph.buffers[b].nbytes for b in self.shared}.values())

    @property
    def activation_bytes(self) -> int:
        """What autograd holds for one layer, what it shares with others included."""
        saved = {*self.graph.saved, *self.shared}
        return sum({self.graph.buffers[b].storage: self.graph.buffers[b].nbytes for b in saved}.values())


@dataclass(frozen=True)
class Outside:
    """What a model chunk runs beside its layers: embedding, last norm, output layer and loss, as far as this stage
    has them. ``graph.activation_bytes`` are what autograd holds for it; the input of the last norm, the output of
    the last layer, is among them."""

    chunk: int
    graph: LayerGraph
    evidence: Evidence
    call: Call


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage. ``args``: Megatron's validated arguments. ``layers_of_chunks``: layers in each
    model chunk. ``parameter_bytes``, ``parameter_count``: of this rank. ``workspace_bytes``: in Megatron's global
    buffers, which the first forward allocates and nothing frees. ``assumptions``: sentences."""

    args: Namespace
    pipeline_rank: int
    layers: tuple[Layers, ...]
    outside: tuple[Outside, ...]
    layers_of_chunks: tuple[int, ...]
    parameter_count: int
    parameter_bytes: int
    workspace_bytes: int
    assumptions: tuple[str, ...]

    @property
    def activation_bytes(self) -> int:
        """What autograd holds for one micro-batch in the layers of this stage, shared tensors once."""
        own = sum(layers.count * (layers.activation_bytes - layers.shared_bytes) for layers in self.layers)
        return own + max((layers.shared_bytes for layers in self.layers), default=0)


@contextlib.contextmanager
def open_stage(settings: Settings) -> Iterator[Stage]:
    """The traced stage, with modules that can be run while the context is open. Nothing is left behind.

    Raises UserError for flags that Megatron refuses, sizes that do not divide, ranks that do not exist, and layers
    whose forward depends on the data."""
    flags, assumed = offline_flags.offline_flags(settings.flags)
    tensor, pipeline = offline_flags.parallel_sizes(flags)
    for rank, size, name in (
        (settings.pipeline_rank, pipeline, "pipeline"),
        (settings.tensor_rank, tensor, "tensor-parallel"),
    ):
        if not 0 <= rank < size:
            raise UserError(f"There is no {name} rank {rank}: the flags give {size}, counted from 0.")
    rank = settings.pipeline_rank * tensor + settings.tensor_rank
    _import_megatron()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_environment_kept())
        stack.enter_context(absent_cuda(settings.capability, settings.memory_bytes))
        args, replaced = offline_flags.parse(flags, settings.world_size or tensor * pipeline, rank)
        stack.enter_context(lone_rank(args, tensor * pipeline, rank))
        try:
            stage = trace_stage(args, settings.pipeline_rank)
        except UserError:
            raise
        except (AssertionError, ValueError, RuntimeError, ImportError, NotImplementedError) as error:
            raise offline_flags.refusal(error, "This model cannot be traced for a device that is not there") from error
        yield replace(stage, assumptions=(*assumed, *replaced))


def trace_offline(settings: Settings) -> Stage:
    """As :func:`open_stage`, for who needs the graphs and figures only: the modules must not be run."""
    with open_stage(settings) as stage:
        return stage


def _import_megatron() -> None:
    """Import all that will be needed while tensors are real: some modules make tensors when they are imported."""
    launch.quiet_missing_libraries()
    for name in (
        "megatron.training.argument_utils",
        "megatron.training.models.gpt",
        "megatron_adacc.megatron.layer",
        "torch.testing._internal.distributed.fake_pg",
    ):
        importlib.import_module(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Megatron prints and logs about its arguments and parameters."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def trace_stage(args: Namespace, pipeline_rank: int) -> Stage:
    """Build and trace the stage of this rank of a job whose process groups stand, real or not."""
    from megatron.core import parallel_state

    chunks = _build(args)
    members = [_layers(chunk) for chunk in chunks]
    calls: list[Call] = []
    outside = []
    for number, (chunk, layers) in enumerate(zip(chunks, members, strict=True)):
        call = _chunk_call(args, chunk, layers)
        with _left_out(layers, calls):
            call.forward(*call.args, **call.kwargs)
        traced = _settled(call)
        outside.append(Outside(number, traced.graph, unverified(traced.graph), call))
    chunk_of = [number for number, layers in enumerate(members) for _ in layers]
    found: dict[Hashable, Layers] = {}
    for places in _classes(calls, chunk_of):
        number, call = chunk_of[places[0]], calls[places[0]]
        traced = _settled(call)
        key = number, fingerprint(traced.graph)
        # Layers that a number tells apart, and their graphs do not: the number is that of the layer.
        places = (*(found[key].places if key in found else ()), *places)
        found[key] = Layers(number, places, traced.graph, unverified(traced.graph), call, traced.objects)
        _backward(call)  # for the global buffers that only a backward pass asks for
    parameters = {id(p): p for chunk in chunks for p in chunk.parameters()}.values()
    workspace = parallel_state.get_global_memory_buffer().buffer.values()
    return Stage(
        args=args,
        pipeline_rank=pipeline_rank,
        layers=tuple(found.values()),
        outside=tuple(outside),
        layers_of_chunks=tuple(len(layers) for layers in members),
        parameter_count=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        workspace_bytes=sum(t.untyped_storage().nbytes() for t in workspace),
        assumptions=(),
    )


def _build(args: Namespace) -> list[Any]:
    """The model chunks of this rank, in training mode and the run's precision."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_adacc.megatron.layer import marked
    from megatron_adacc.patches import core_transformer_spec_utils, core_transformer_torch_norm, patching
    from megatron_adacc.patches.training_argument_utils import with_sentences

    config = with_sentences(gpt_config_from_args)(args)
    with_sentences(config.finalize)()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with patching.apply([*core_transformer_spec_utils.patches(marked), *core_transformer_torch_norm.patches()]):
        chunks = GPTModelBuilder(config).build_distributed_models(
            groups, wrap_with_ddp=False, data_parallel_random_init=False
        )
    return [chunk.train() for chunk in chunks]


def _layers(chunk: nn.Module) -> list[nn.Module]:
    from megatron_adacc.megatron.layer import AdaccMark

    found: list[nn.Module] = [module for module in chunk.modules() if isinstance(module, AdaccMark)]
    return found


def _chunk_call(args: Namespace, chunk: Any, layers: Sequence[nn.Module]) -> Call:
    """A micro-batch's call of the chunk as pretrain_gpt.py makes it, with the layers left out."""
    model = getattr(chunk, "module", chunk)
    shape = (args.micro_batch_size, args.seq_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    first, last = model.pre_process, model.post_process
    positions = torch.zeros(shape, dtype=torch.int64) if first else None
    mask = None
    if (first or last) and args.create_attention_mask_in_dataloader:
        mask = torch.zeros((args.micro_batch_size, 1, args.seq_length, args.seq_length), dtype=torch.bool)
    received = None  # from the stage before
    if not first:
        length = args.seq_length // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        size = (length, args.micro_batch_size, args.hidden_size)
        received = torch.zeros(size, dtype=model.config.pipeline_dtype or args.params_dtype, requires_grad=True)

    def forward(received: Tensor | None, *inputs: Any, **named: Any) -> Any:
        model.set_input_tensor(received)
        try:
            with _left_out(layers, []):
                return chunk(*inputs, **named)
        finally:
            model.set_input_tensor(None)

    labels = {"labels": tokens, "loss_mask": torch.ones(shape)} if last else {"labels": None, "loss_mask": None}
    return Call(chunk, forward, (received, tokens if first else None, positions, mask), labels)


@contextlib.contextmanager
def _left_out(layers: Sequence[nn.Module], calls: list[Call]) -> Iterator[None]:
    """Inside, each layer gives back its hidden states; its calls are appended to `calls`."""

    def stand_in(layer: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(Call(layer, own, _as_leaves(args), _as_leaves(kwargs)))
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            return hidden, kwargs.get("context")

        return forward

    forwards = [layer.forward for layer in layers]
    try:
        for layer, own in zip(layers, forwards, strict=True):
            if "forward" not in vars(layer):
                layer.forward = stand_in(layer, own)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _as_leaves(value: Any) -> Any:
    """The arguments of a call without the graph behind them."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: _as_leaves(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_as_leaves(item) for item in value)
    return value


def _classes(calls: Sequence[Call], chunk_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Places of layers that one trace serves, as attach() tells them apart, and within one chunk."""
    kinds: dict[Hashable, dict[int, nn.Module]] = {}
    keys = [class_key(call.module) for call in calls]
    for place, (key, call) in enumerate(zip(keys, calls, strict=True)):
        kinds.setdefault(key, {})[place] = call.module
    numbering = {key: numbering_attributes(modules) for key, modules in kinds.items()}
    classes: dict[Hashable, list[int]] = {}
    for place, (key, call) in enumerate(zip(keys, calls, strict=True)):
        state = LiveState(call.module, numbering[key]).key()
        arguments = arguments_key(call.args, call.kwargs, [])
        classes.setdefault((chunk_of[place], key, state, arguments), []).append(place)
    return [tuple(places) for places in classes.values()]


def _settled(call: Call) -> Traced:
    """The trace on which two calls in a row agree, strengthened by both.

    Raises UserError where no two agree."""
    earlier: Traced | None = None
    for _ in range(_MAX_TRACES):
        traced = _traced(call)
        if earlier is not None and same_program(earlier.graph, traced.graph):
            return prove(earlier, traced, depends_on_host=False)
        earlier = traced
    raise UserError(
        f"{type(call.module).__name__} runs other ops from call to call, so that it cannot be planned ahead."
    )


def _backward(call: Call) -> None:
    """Run the call forward and backward; the gradients are dropped."""
    outputs = [t for _, t in flatten_tensors(call.forward(*call.args, **call.kwargs), "") if t.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    call.module.zero_grad(set_to_none=True)
    for _, tensor in call_tensors(call.args, call.kwargs):
        tensor.grad = None


def _traced(call: Call) -> Traced:
    """One trace. The layer's own forward runs, inside the module's call for its submodules' sake."""
    tracer = Tracer(call.module, call.args, call.kwargs)
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        tracer.pack(tensor)
        kept.append(tensor.detach())
        return kept[-1]

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), tracer:
        output = call.forward(*call.args, **call.kwargs)
    return tracer.finish(output)
