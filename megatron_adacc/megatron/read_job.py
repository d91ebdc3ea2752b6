"""From a job's flags, read by Megatron's own parser, to the plain data that the memory model works on."""

import contextlib
import importlib
import inspect
import io
import logging
import math
import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from megatron_adacc.cost.finetuning import Adapters
from megatron_adacc.cost.gpt_parameters import Chunk, GptModel, padded_vocab_size
from megatron_adacc.cost.in_flight import Schedule
from megatron_adacc.cost.job import Job
from megatron_adacc.cost.outer_activations import OuterShape
from megatron_adacc.cost.static_memory import Buckets, Training
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import launch, lora
from megatron_adacc.megatron.flags import add_flags
from megatron_adacc.megatron.state_flags import bucket_elements

# What a job needs to be understood, and has no default in Megatron: small ones, where the flags do not say.
_DEFAULTS = {"--micro-batch-size": "1", "--seq-length": "1024"}

# attribute -> (flag, the values that the memory model knows)
_KNOWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_experts": ("--num-experts", (None,)),
    "multi_latent_attention": ("--multi-latent-attention", (False,)),
    "mtp_num_layers": ("--mtp-num-layers", (None, 0)),
    "hybrid_layer_pattern": ("--hybrid-layer-pattern", (None,)),
    "heterogeneous_layers_config_path": ("--heterogeneous-layers-config-path", (None,)),
    "use_precision_aware_optimizer": ("--use-precision-aware-optimizer", (False,)),
    "optimizer_cpu_offload": ("--optimizer-cpu-offload", (False,)),
    "optimizer": ("--optimizer", ("adam", "sgd")),
    "fp8": ("--fp8-format", (None,)),
    "fp4": ("--fp4-format", (None,)),
    "adacc_lora_rank": ("--adacc-lora-rank", (None,)),
}

_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def job_of_flags(program: str, flags: Sequence[str], world_size: int, cuda: bool | None = None) -> Job:
    """The job that `flags` describe on `world_size` ranks, on CUDA devices or on the CPU; None for what this machine
    has. Starts nothing; Megatron is imported.

    Raises UserError in Megatron's words for what it refuses, and for kinds of model that are not counted."""
    return job_of_args(args_of_flags(program, flags, world_size, cuda), cuda)


def args_of_flags(program: str, flags: Sequence[str], world_size: int, cuda: bool | None = None) -> Namespace:
    """Megatron's validated arguments for such a job. Raises UserError in Megatron's words for what it refuses."""
    tokens = list(flags)
    given = {token.split("=")[0] for token in tokens if token.startswith("--")}
    for name, value in _DEFAULTS.items():
        if name not in given:
            tokens += [name, value]
    if "--max-position-embeddings" not in given:
        tokens += ["--max-position-embeddings", value_of(tokens, "--seq-length")]
    absent = bool(cuda) and not _on_cuda()
    if not absent:
        launch.prepare(program, tokens)
    launch.quiet_missing_libraries()
    importlib.import_module("megatron.training.arguments")  # while tensors are real
    environment, command = dict(os.environ), sys.argv
    os.environ.update(WORLD_SIZE=str(world_size), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS=connections_of(tokens))
    sys.argv = [program, *tokens]
    try:
        with _quiet():
            return _validated_for_absent_device() if absent else _validated()
    finally:
        sys.argv = command
        os.environ.clear()
        os.environ.update(environment)


def connections_of(flags: Sequence[str]) -> str:
    """CUDA_DEVICE_MAX_CONNECTIONS as Megatron wants it: one for tensor parallelism on older GPUs, more for parameters
    that are fully sharded."""
    return "8" if {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(flags) else "1"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out that Megatron prints all of its arguments, and tells what it sets itself."""
    level = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def ranks_of_one_replica(flags: Sequence[str]) -> int:
    """Ranks that one copy of the model is split over: tensor- times pipeline- times context-parallel."""
    sizes = []
    for name in ("tensor-model", "pipeline-model", "context"):
        text = value_of(flags, f"--{name}-parallel-size") or "1"
        if not text.isdigit() or int(text) == 0:
            raise UserError(f"--{name}-parallel-size is {text!r}, but it must be a whole number of at least 1.")
        sizes.append(int(text))
    return math.prod(sizes)


def value_of(tokens: Sequence[str], flag: str) -> str:
    """The last value that `tokens` give to `flag`."""
    value = ""
    for index, token in enumerate(tokens):
        if token == flag:
            value = tokens[index + 1] if index + 1 < len(tokens) else ""
        elif token.startswith(f"{flag}="):
            value = token.partition("=")[2]
    return value


def _validated() -> Namespace:
    from megatron.training import arguments

    from megatron_adacc.patches.training_argument_utils import with_sentences

    args = arguments.parse_args()
    with_sentences(arguments.validate_args)(args, {})
    return args


def _validated_for_absent_device() -> Namespace:
    """The same without a GPU, not as a process would run them that was prepared for the CPU."""
    from megatron.training import arguments

    from megatron_adacc.devices.absent import absent_cuda
    from megatron_adacc.patches.training_argument_utils import with_sentences

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message} (megatron-core knows no such flag or value).")

    def provider(parser: ArgumentParser) -> ArgumentParser:
        parser.error = refuse  # type: ignore[method-assign]
        return add_flags(parser)

    with absent_cuda():
        args = inspect.unwrap(arguments.parse_args)(provider)
        with_sentences(inspect.unwrap(arguments.validate_args))(args, {})
    return args


def job_of_args(args: Namespace, cuda: bool | None = None, adapters: bool = False) -> Job:
    """The job of Megatron's validated arguments, `args.world_size` ranks in all; `cuda` as above. ``adapters``: whether
    a job that trains adapters may be one; what is planned without its layers does not know them.

    Raises UserError for kinds of model and optimizer that are not counted."""
    for name, (flag, known) in _KNOWN.items():
        if adapters and name == "adacc_lora_rank":
            continue
        if getattr(args, name, known[0]) not in known:
            raise UserError(f"{flag} {getattr(args, name)} is not in the memory model: leave it out.")
    schedule = schedule_of_args(args)
    job = Job(
        model=_model(args),
        stages=_stages(args, schedule.stages, schedule.chunks),
        schedule=schedule,
        training=_training(args),
        outer=_outer(args, _on_cuda() if cuda is None else cuda),
        tensor_parallel=args.tensor_model_parallel_size,
        adapters=_adapters(args),
    )
    return replace(job, buckets=_buckets(args, job))


def _adapters(args: Namespace) -> Adapters | None:
    """Raises UserError for targets beside which the memory model has no adapters."""
    if getattr(args, "adacc_lora_rank", None) is None:
        return None
    wanted = lora.targets_of(args)
    for name in wanted:
        if name not in lora.TARGETS:
            raise UserError(
                f"The memory model does not know an adapter beside {name!r}, only beside {', '.join(lora.TARGETS)}."
            )
    return Adapters(args.adacc_lora_rank, tuple(wanted), args.adacc_base)


def schedule_of_args(args: Namespace) -> Schedule:
    """The pipeline schedule of Megatron's validated arguments, for any kind of model."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    group = args.microbatch_group_size_per_vp_stage
    return Schedule(args.pipeline_model_parallel_size, micro_batches(args), chunks, group)


def _model(args: Namespace) -> GptModel:
    learned = args.position_embedding_type == "learned_absolute"
    return GptModel(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        vocab_size=_vocabulary(args),
        positions=args.max_position_embeddings if learned else 0,
        gated=args.swiglu,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_bias_linear or args.add_qkv_bias,
        norm_bias=args.normalization == "LayerNorm",
        qk_norm=args.qk_layernorm,
        tied=not args.untie_embeddings_and_output_weights,
    )


def _vocabulary(args: Namespace) -> int:
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size
    if args.vocab_size is None:
        raise UserError(
            "The size of the vocabulary is not given: add --vocab-size, or --padded-vocab-size for the size with "
            "padding."
        )
    return padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size)


def _stages(args: Namespace, pipeline: int, chunks: int) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every stage, by Megatron's own division of the layers."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_adacc.patches.training_argument_utils import with_sentences

    with _quiet():
        config = with_sentences(core_transformer_config_from_args)(args)
    layout = config.pipeline_model_parallel_layout
    stages = []
    for stage in range(pipeline):
        found = []
        for chunk in range(chunks):
            if layout is not None:
                layers = sum(kind.name == "decoder" for kind in layout.layout[stage][chunk])
            else:
                layers = with_sentences(get_num_layers_to_build)(config, chunk if chunks > 1 else None, stage)
            first = (stage, chunk) == (0, 0)
            found.append(Chunk(layers, first, (stage, chunk) == (pipeline - 1, chunks - 1)))
        stages.append(tuple(found))
    return tuple(stages)


def micro_batches(args: Namespace) -> int:
    """Micro-batches of a step on each pipeline: the global batch over what all pipelines take at once. Where the batch
    grows during the training, those of its largest: a plan must do for all steps."""
    largest, flag = args.global_batch_size, "--global-batch-size"
    if getattr(args, "step_batch_size_schedule", None):
        largest, flag = _largest_batch(args), "--step-batch-size-schedule with a batch of"
    at_once = args.micro_batch_size * args.data_parallel_size
    if largest % at_once:
        raise UserError(
            f"{flag} {largest} is not a multiple of {at_once}: --micro-batch-size "
            f"{args.micro_batch_size} times {args.data_parallel_size} data-parallel ranks."
        )
    return int(largest // at_once)


def _largest_batch(args: Namespace) -> int:
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    # Rank 0 would log.
    try:
        calculator = StepBatchsizeNumMicroBatchesCalculator(
            args.micro_batch_size, args.data_parallel_size, False, 1, args.step_batch_size_schedule, args.seq_length
        )
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"--step-batch-size-schedule {args.step_batch_size_schedule!r} cannot be read: {error}"
        ) from None
    return max(size for _, size in calculator.schedule)


def _training(args: Namespace) -> Training:
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32"
    zero = 1 if args.use_distributed_optimizer else 0
    if args.use_torch_fsdp2:
        zero = 3
    elif args.use_megatron_fsdp:
        zero = _STRATEGIES[args.data_parallel_sharding_strategy]
    ranks = args.data_parallel_size * args.context_parallel_size
    if zero == 1:
        ranks //= args.num_distributed_optimizer_instances  # each instance shares among its own ranks
    fp32_gradients = args.accumulate_allreduce_grads_in_fp32 or precision == "fp32"
    return Training(
        precision=precision,
        optimizer=args.optimizer,
        gradient_bytes=4 if fp32_gradients else 2,
        momentum=args.sgd_momentum != 0,
        zero=zero,
        data_parallel=ranks,
        torch_optimizer=_torch_optimizer(),
    )


def _torch_optimizer() -> bool:
    from megatron.core import optimizer

    return bool(optimizer.USING_PYTORCH_OPTIMIZER)


def _buckets(args: Namespace, job: Job) -> Buckets:
    """The bucket size that Megatron's _ddp_wrap takes."""
    size = bucket_elements(args)
    if args.ddp_num_buckets is not None:
        size = job.parameters(0) // args.ddp_num_buckets
    return Buckets(size if args.overlap_grad_reduce else None, bool(args.ddp_pad_buckets_for_high_nccl_busbw))


def _outer(args: Namespace, cuda: bool) -> OuterShape:
    element_bytes = 2 if args.fp16 or args.bf16 else 4
    unfused = args.transformer_impl == "local" and not args.use_flash_attn
    return OuterShape(
        sequence=args.seq_length // args.context_parallel_size,
        micro_batch=args.micro_batch_size,
        hidden_size=args.hidden_size,
        vocab_size=_vocabulary(args),
        element_bytes=element_bytes,
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else element_bytes,
        tensor_parallel=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        dropout=args.hidden_dropout > 0,
        positions=args.position_embedding_type == "learned_absolute",
        rms_norm=args.normalization == "RMSNorm",
        tied=not args.untie_embeddings_and_output_weights,
        rotary_channels=int(args.kv_channels * args.rotary_percent) if args.position_embedding_type == "rope" else 0,
        scores_heads=args.num_attention_heads if unfused else 0,
        attention_mask=args.create_attention_mask_in_dataloader,
        cuda=cuda,
        frozen=getattr(args, "adacc_lora_rank", None) is not None,
    )


def _on_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
