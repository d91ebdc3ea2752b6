"""Pretrain a GPT with Megatron-LM, on a GPU or a CPU:

    torchrun --nproc-per-node N pretrain_gpt.py <Megatron's own flags> [--adacc-plan PLAN]

Megatron's standard job on top of megatron.training: every flag of Megatron's parser, plus ours. Supervised
fine-tuning (--sft), fill-in-the-middle (--fim-data) and distillation from saved logits are left to
upstream's script, which runs with the same flags through `adacc run`.
"""

import time

PROGRAM_START = time.time()

from megatron_adacc.megatron import launch

if __name__ == "__main__":
    # Before Megatron is imported: it imports names of torch.cuda by value.
    launch.prepare("pretrain_gpt.py")

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_adacc.megatron import checks
from megatron_adacc.megatron.batches import get_batch, has_mtp, packed_sequences

# A loss this many times the largest seen so far is reported as spiky.
SPIKY_LOSS_FACTOR = 10


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Summed loss of the unmasked tokens, their number, and both as Megatron's report wants them."""
    args, mask = get_args(), loss_mask.view(-1).float()
    loss = (output.view(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    rerun = get_rerun_state_machine()
    rejections: list[tuple[Any, str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        rejections += [
            (torch.isnan, "the local loss is NaN", True),
            (torch.isinf, "the local loss is infinite", True),
        ]
    if args.check_for_spiky_loss:
        spiky = partial(rerun.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss")
        rejections.append((spiky, "the local loss is spiky", False))
    for rejected, message, fatal in rejections:
        # The forward pass is deterministic: a rerun that disagrees at all shows a fault of the hardware.
        rerun.validate_result(result=loss, rejection_func=rejected, message=message, tolerance=0.0, fatal=fatal)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(data_iterator: Iterator, model: Any, return_schedule_plan: bool = False) -> tuple:
    """One micro-batch through this rank's model chunk; returns its output and the loss function for it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = packed_sequences(batch)
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    shared = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    if return_schedule_plan:
        return model.build_schedule_plan(*inputs, **shared), partial(loss_func, batch["loss_mask"])
    return model(*inputs, **shared, packed_seq_params=packed), partial(loss_func, batch["loss_mask"])


def datasets(samples: list[int], vp_stage: int | None = None) -> tuple:
    """The training, validation and test sets, built on the ranks that read them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as stream:
            per_dataset = json.load(stream)
    settings = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": build_tokenizer(args),
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "sequences_per_dataset": per_dataset,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    # The other settings have the name of their flag.
    names = {field.name for field in dataclasses.fields(GPTDatasetConfig) if field.init} & vars(args).keys()
    config = GPTDatasetConfig(**{**{name: getattr(args, name) for name in names}, **settings})

    def reads_data() -> bool:
        first = mpu.get_tensor_model_parallel_rank() == 0
        return first and (is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage))

    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, reads_data, config).build()


# Megatron builds the sets on every rank, not on the first alone.
datasets.is_distributed = True  # type: ignore[attr-defined]


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold the word embedding: first, last if it is tied, and those of MTP layers."""
    args = get_args()
    if len(pipeline_ranks) == 1:
        return [pipeline_ranks[0]]
    ranks = {pipeline_ranks[0]}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pipeline_ranks[-1])
    ranks.update(get_mtp_ranks(pipeline_ranks, megatron_arguments.core_transformer_config_from_args(args)))
    return sorted(ranks)


def main() -> None:
    """Parse, build, train."""
    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    train, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = megatron_arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    checks.refuse_jobs_of_upstream(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    train(
        config,
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    with launch.user_errors("pretrain_gpt.py"):
        main()
