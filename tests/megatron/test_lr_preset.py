"""What --adacc-lr-preset delayed writes into Megatron's arguments."""

from argparse import Namespace

import pytest

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.state_flags import apply_preset


def settings(**changed: object) -> Namespace:
    own = {"adacc_lr_preset": "delayed", "adacc_dgr_group_size": 4, "lr": 1e-3, "lr_warmup_iters": 100}
    buckets = {"overlap_grad_reduce": False, "ddp_num_buckets": None, "ddp_bucket_size": None}
    other = {"fp16": False, "bf16": False, "accumulate_allreduce_grads_in_fp32": False}
    return Namespace(**{**own, **buckets, **other, "data_parallel_size": 8, "context_parallel_size": 1, **changed})


@pytest.mark.parametrize(("groups", "factor"), [(2, 1.2), (4, 1.35), (6, 1.5), (12, 1.5)])
def test_the_rate_and_the_warm_up(groups, factor):
    args = settings(adacc_dgr_group_size=groups)
    said = apply_preset(args)
    assert args.lr == pytest.approx(factor * 1e-3)
    assert args.lr_warmup_iters == 130
    assert args.ddp_bucket_size is None
    assert "lr_warmup_iters 100 -> 130" in said


@pytest.mark.parametrize(
    ("changed", "elements"),
    [
        ({}, 20 * 2**21),  # of Megatron's 40,000,000
        ({"ddp_bucket_size": 2**21}, 2**21),
        ({"ddp_bucket_size": 2**21 + 1}, 2 * 2**21),
        ({"bf16": True, "ddp_bucket_size": 1}, 2**22),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": True, "ddp_bucket_size": 1}, 2**21),
        ({"data_parallel_size": 64}, 31 * 2**21),  # of 64,000,000
    ],
)
def test_buckets_are_multiples_of_8_mib(changed, elements):
    args = settings(overlap_grad_reduce=True, **changed)
    assert f"-> {elements:,} (a multiple of 8 MiB)" in apply_preset(args)
    assert args.ddp_bucket_size == elements
    assert elements * (2 if args.bf16 and not args.accumulate_allreduce_grads_in_fp32 else 4) % 2**23 == 0


def test_a_number_of_buckets_is_left_alone():
    args = settings(overlap_grad_reduce=True, ddp_num_buckets=3)
    assert "ddp_bucket_size" not in apply_preset(args)
    assert args.ddp_bucket_size is None


def test_it_needs_groups():
    with pytest.raises(UserError, match="is for delayed groups"):
        apply_preset(settings(adacc_dgr_group_size=1))
    assert apply_preset(settings(adacc_lr_preset=None)) is None
