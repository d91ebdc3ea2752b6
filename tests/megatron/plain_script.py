"""A Megatron script that knows nothing of us: strict parser, mock data, a small GPT. For `adacc run`.

After training it prints what tensor-parallel ranks must share and what they must not: the replicated
parameters, numbers drawn from the default generator, numbers drawn in a fork of Megatron's RNG tracker.
"""

from functools import partial

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

models = []


def datasets(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split="1,1,1",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, samples, lambda: mpu.get_tensor_model_parallel_rank() == 0, config
    ).build()


datasets.is_distributed = True


def loss(mask, output):
    total, tokens = (output.view(-1).float() * mask.view(-1)).sum(), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(iterator, model):
    models.append(model)
    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    batch = [next(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None]
    torch.distributed.broadcast_object_list(
        batch, mpu.get_tensor_model_parallel_src_rank(), group=mpu.get_tensor_model_parallel_group()
    )
    tokens, labels, mask, positions, attention = (batch[0][name].cuda() for name in names)
    return model(tokens, positions, attention, labels=labels), partial(loss, mask)


def same_everywhere(tensor):
    group = mpu.get_tensor_model_parallel_group()
    everyone = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(everyone, tensor.contiguous(), group=group)
    return all(torch.equal(everyone[0], other) for other in everyone[1:])


def main():
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    model = models[-1]
    replicated = [p for p in model.parameters() if not getattr(p, "tensor_model_parallel", False)]
    # Every comparison is a collective: all are made, whatever the first ones say.
    equal = [same_everywhere(parameter.data) for parameter in replicated]
    results = {
        "replicated parameters": all(equal),
        "default draws": same_everywhere(torch.rand(64)),
    }
    with tensor_parallel.get_cuda_rng_tracker().fork():
        results["forked draws"] = same_everywhere(torch.rand(64))
    if torch.distributed.get_rank() == 0:
        print("same on all tensor-parallel ranks:", results, len(replicated), flush=True)


if __name__ == "__main__":
    main()
