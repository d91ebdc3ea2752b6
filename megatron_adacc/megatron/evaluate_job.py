"""One rank of `adacc evaluate`: load a Megatron checkpoint, score the sequences of a task, write the result.

    python -m megatron_adacc.megatron.evaluate_job --task FILE --result FILE [--base DIR] <Megatron's flags with --load>

Tensor-, pipeline- and data-parallel ranks work as in training; logits are gathered over the tensor-parallel ones.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_adacc.megatron import launch
from megatron_adacc.megatron.read_job import value_of

if TYPE_CHECKING:
    import torch

    from megatron_adacc.megatron.evaluate_task import Score, Scored

PROGRAM = "adacc evaluate"


def main() -> None:
    """Evaluate; rank 0 writes the result."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--base")
    own, flags = parser.parse_known_args()
    sys.argv = [PROGRAM, *flags]
    # Before Megatron is imported: it imports names of torch.cuda by value.
    launch.prepare(PROGRAM)
    with launch.user_errors(PROGRAM):
        if own.base is not None:
            sys.argv += _adapters_flags(own.base, flags)
        evaluate(own)


def _adapters_flags(base: str, given: Sequence[str]) -> list[str]:
    """What is to be added to the flags of a job that has the adapters in --load beside `base`. Raises UserError where
    it holds none."""
    from megatron_adacc.errors import UserError
    from megatron_adacc.megatron import checkpoint_files

    checkpoint = value_of(given, "--load")
    args = checkpoint_files.find(checkpoint).args
    if getattr(args, "adacc_lora_rank", None) is None:
        raise UserError(f"--base is for adapters, but {checkpoint} holds a whole model: leave --base out.")
    flags = ["--pretrained-checkpoint", base]
    for name in ("lora_rank", "lora_alpha", "lora_targets", "base", "base_text"):
        flag, value = f"--adacc-{name.replace('_', '-')}", getattr(args, f"adacc_{name}", None)
        if value is not None and not value_of(given, flag):
            flags += [flag, str(value)]
    return flags


def evaluate(own: Namespace) -> None:
    """The job, in a prepared process. Raises UserError for a task or flags that cannot be used."""
    import torch
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import arguments
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.initialize import initialize_megatron, set_jit_fusion_options
    from megatron.training.training import setup_model_and_optimizer

    from megatron_adacc.atomic import write_text
    from megatron_adacc.megatron import evaluate_task
    from megatron_adacc.megatron.console import rank

    examples = evaluate_task.read(own.task)
    args = arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    _refuse(args)
    model_config = gpt_config_from_args(args)
    model_config.parallel_output = False
    container = pretrain_cfg_container_from_args(args, model_config)
    initialize_megatron()
    set_jit_fusion_options(tp_size=args.tensor_model_parallel_size)
    model, _, _ = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    for chunk in model:
        chunk.eval()
    tokenizer = build_tokenizer(args)
    asked = evaluate_task.sequences(examples, tokenizer.tokenize, args.seq_length)
    share, rounds = _share(asked, mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), args)
    with torch.no_grad():
        own_scores = _score(model, share, rounds, int(tokenizer.vocab_size), args)
    everyone: list[list[Score]] = [[] for _ in range(torch.distributed.get_world_size())]
    speaks = mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0
    torch.distributed.all_gather_object(everyone, own_scores if speaks else [])
    if rank() == 0:
        summary = evaluate_task.summarize(examples, asked, [score for one in everyone for score in one])
        write_text(own.result, json.dumps({"iteration": int(args.iteration), **summary}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _refuse(args: Namespace) -> None:
    from megatron_adacc.errors import UserError

    for name, flag, plain in (
        ("context_parallel_size", "--context-parallel-size", 1),
        ("virtual_pipeline_model_parallel_size", "--num-layers-per-virtual-pipeline-stage", None),
    ):
        if getattr(args, name) != plain:
            raise UserError(f"adacc evaluate does not know {flag}: leave it out; the checkpoint may have been made so.")


def _share(
    asked: Sequence["Scored"], rank: int, ranks: int, args: Namespace
) -> tuple[list["Scored"], int]:  # fmt: skip
    """This data-parallel rank's sequences, and how many micro-batches all ranks run."""
    longest = len(asked[::ranks])
    return list(asked[rank::ranks]), -(-longest // args.micro_batch_size)


def _score(model: list, share: list["Scored"], rounds: int, vocabulary: int, args: Namespace) -> list["Score"]:
    """The scores of a rank's sequences; without those, on stages before the last."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_adacc.megatron.console import say

    run = get_forward_backward_func()
    found: list[Score] = []
    size = args.micro_batch_size
    for number in range(rounds):
        batch = share[number * size : (number + 1) * size]
        outputs = run(
            forward_step_func=_forward_step,
            data_iterator=iter([(batch, vocabulary, args)]),
            model=model,
            num_microbatches=1,
            seq_length=args.seq_length,
            micro_batch_size=size,
            decoder_seq_length=args.decoder_seq_length,
            forward_only=True,
            collect_non_loss_data=True,
        )
        found += [score for one in outputs for score in one]
        say(f"evaluated {number + 1} of {rounds} micro-batches")
    return found


def _forward_step(data_iterator: Iterator, model: Any) -> tuple:
    """Logits (micro-batch, sequence, vocabulary) of a batch, and the function that scores it by them."""
    import torch

    batch, vocabulary, args = next(data_iterator)
    tokens = torch.zeros(args.micro_batch_size, args.seq_length, dtype=torch.int64)
    for row, one in enumerate(batch):
        tokens[row, : len(one.tokens) - 1] = torch.tensor(one.tokens[:-1])
    positions = torch.arange(args.seq_length).expand_as(tokens)
    # What follows a sequence cannot be seen by it: the mask is causal.
    mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)

    def scores(logits: "torch.Tensor", non_loss_data: bool) -> list["Score"]:
        # Without Megatron's padding of the vocabulary, which depends on the number of tensor-parallel ranks.
        return [_of_row(one, logits[row, :, :vocabulary]) for row, one in enumerate(batch)]

    return model(tokens.cuda(), positions.cuda(), mask.cuda(), labels=None), scores


def _of_row(one: "Scored", logits: "torch.Tensor") -> "Score":
    """The score of one sequence. ``logits``: (sequence, vocabulary), of any dtype; float32 inside."""
    import torch

    from megatron_adacc.megatron.evaluate_task import Score

    end = len(one.tokens) - 1
    predicted = torch.log_softmax(logits[end - one.scored : end].float(), dim=-1)
    wanted = torch.tensor(one.tokens[-one.scored :], device=logits.device)
    log_probability = float(predicted.gather(1, wanted[:, None]).double().sum())
    return Score(one.example, one.choice, log_probability, bool((predicted.argmax(dim=-1) == wanted).all()))


if __name__ == "__main__":
    main()
