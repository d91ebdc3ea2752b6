"""This rank's part of a micro-batch: read on tensor-parallel rank 0, sent to its peers, split over context ranks."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

# Name -> tensor, or None where this rank does not need it (hybrid_cp_group is a process group).
Batch = dict[str, Any]

FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
PACKED_FIELDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group")


def has_mtp(args: Namespace, vp_stage: int | None) -> bool:
    """Whether multi-token prediction layers, which need the tokens, live on this rank."""
    config = core_transformer_config_from_args(args)
    layout, layers = config.pipeline_model_parallel_layout, config.mtp_num_layers
    return mtp_on_this_rank(layout=layout, mtp_num_layers=layers, ignore_virtual=False, vp_stage=vp_stage)


def get_batch(data_iterator: Iterator, vp_stage: int | None) -> Batch:
    """This rank's part of the next micro-batch: (micro-batch, sequence) tensors, None where not needed."""
    args = get_args()
    packed, mtp = args.dataloader_inter_document_masking, has_mtp(args, vp_stage)
    reads = is_first_or_last_pipeline_stage(vp_stage) or mtp
    nothing: Batch = dict.fromkeys(FIELDS + PACKED_FIELDS)
    if not reads and not packed:
        return nothing
    loaded = nothing
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        loaded = {
            name: sample[name].cuda(non_blocking=True) if sample.get(name) is not None else None for name in nothing
        }
    batch = get_batch_on_this_tp_rank(
        loaded,
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if reads:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=packed,
        )
    return {**nothing, **batch}


def packed_sequences(batch: Batch) -> PackedSeqParams | None:
    """The document boundaries of a packed micro-batch, for attention that stays within a document."""
    if batch["cu_seqlens"] is None:
        return None
    bounds = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(bounds)
    padded = batch["cu_seqlens_padded"].squeeze(0) if batch["cu_seqlens_padded"] is not None else None
    longest, used = int(batch["max_seqlen"].item()), padded if padded is not None else bounds
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used,
        cu_seqlens_kv=used,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=int(batch["local_cp_size"].item()) if batch["local_cp_size"] is not None else None,
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )
