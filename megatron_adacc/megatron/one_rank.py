"""A model on one rank outside a training, for commands that look at its layers: built by Megatron's own builder, run on
random tokens. No data set or tokenizer is read."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_adacc.errors import UserError

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def noise_aside() -> Iterator[None]:
    """Inside, what Megatron and its libraries print goes to a file; it is shown if something goes wrong."""
    sys.stdout.flush()
    shown = os.dup(1)
    with tempfile.TemporaryFile() as noise:
        os.dup2(noise.fileno(), 1)
        try:
            yield
        except UserError:
            raise
        except Exception:
            sys.stdout.flush()
            noise.seek(0)
            sys.stderr.write(noise.read().decode(errors="replace"))
            raise
        finally:
            sys.stdout.flush()
            os.dup2(shown, 1)
            os.close(shown)


def start(plan: str) -> Namespace:
    """Megatron's arguments, validated, and its process groups of one rank."""
    from megatron.training import arguments, initialize

    from megatron_adacc.megatron import strategies

    args = arguments.parse_and_validate_args()
    strategies.get(plan).apply(args)
    initialize.initialize_megatron()
    return args


def build(args: Namespace) -> tuple[Any, list[nn.Module]]:
    """The model, in training mode and the run's precision, and its transformer layers."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    config = gpt_config_from_args(args)
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = GPTModelBuilder(config).build_distributed_models(groups, wrap_with_ddp=False)
    return model.train(), [module for module in model.modules() if isinstance(module, BaseTransformerLayer)]


def forward(model: Any, args: Namespace) -> Any:
    """One forward on random tokens [micro-batch, sequence], with the mask that training would give."""
    import torch

    device = next(model.parameters()).device
    shape = (args.micro_batch_size, args.seq_length)
    tokens = torch.randint(0, 127, shape, device=device)
    positions = torch.arange(args.seq_length, device=device).expand(shape)
    mask = None
    if args.create_attention_mask_in_dataloader:
        square = torch.ones(args.seq_length, args.seq_length, dtype=torch.bool, device=device).triu(1)
        mask = square.expand(args.micro_batch_size, 1, -1, -1).contiguous()
    return model(tokens, positions, mask, labels=tokens)
