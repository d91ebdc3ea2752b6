"""The plans off, full and selective: same losses, less memory."""

import re
from argparse import Namespace

import pytest

from megatron_adacc.errors import UserError
from megatron_adacc.megatron import strategies

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def arguments(**given):
    defaults = dict.fromkeys(strategies._RECOMPUTE_FLAGS)
    return Namespace(**{**defaults, **given})


def test_recompute_restores_the_dropout_so_that_all_losses_are_equal_bit_for_bit(trained):
    runs = {plan: trained(plan=plan, iterations=6, **DROPOUT) for plan in ("off", "selective", "full")}
    assert len(runs["off"].losses) == 6
    assert runs["off"].losses == runs["selective"].losses == runs["full"].losses
    # Training happens: the loss of a uniform guess is log(128) = 4.852, and no two iterations are alike.
    assert len(set(runs["off"].losses)) == 6
    held = {plan: run.summary["held_bytes"] for plan, run in runs.items()}
    assert held["full"] < held["selective"] < held["off"]


def test_full_recompute_holds_one_input_a_layer(trained):
    held = trained(plan="full", iterations=1, **DROPOUT).report["layer_held_bytes"]
    # sequence 16 x micro-batch 2 x hidden 32 x 4 bytes, and the generator states that restore the dropout:
    # host's, device's and the fork's. A CPU generator's state has 5056 bytes (a GPU's has 16).
    assert held["layer.2"] == 4096 + 3 * 5056
    # The first layer also counts what all share: the 16 x 16 mask of each sample, the other forks' states.
    assert held["layer.1"] == 4096 + 3 * 5056 + 2 * 16 * 16 + 2 * 5056


def printed(run):
    """Megatron's own lines about iterations, without times."""
    lines = [line for line in run.text.splitlines() if "lm loss:" in line]
    return [re.sub(r"\[.*?\]|elapsed time[^|]*\|", "", line) for line in lines]


def test_off_installs_nothing_and_a_report_changes_no_bit(trained):
    plain = trained(plan=None, report=False, **DROPOUT)
    off = trained(plan="off", report=False, **DROPOUT)
    measured = trained(plan="off", report=True, **DROPOUT)
    assert len(printed(plain)) == 4
    assert printed(plain) == printed(off) == printed(measured)
    assert "adacc iteration" not in off.text
    assert "adacc iteration" in measured.text


def test_full_writes_megatrons_own_flags():
    args = arguments()
    strategies.get("full").apply(args)
    assert (args.recompute_granularity, args.recompute_method, args.recompute_num_layers) == ("full", "uniform", 1)


def test_selective_recomputes_the_core_attention():
    args = arguments()
    strategies.get("selective").apply(args)
    assert (args.recompute_granularity, args.recompute_modules) == ("selective", ["core_attn"])


def test_off_leaves_megatrons_own_recompute_flags_alone():
    args = arguments(recompute_granularity="full")
    before = vars(args).copy()
    strategies.get("off").apply(args)
    assert vars(args) == before


@pytest.mark.parametrize("plan", ["full", "selective"])
@pytest.mark.parametrize(("name", "flag"), sorted(strategies._RECOMPUTE_FLAGS.items()))
def test_a_plan_beside_megatrons_own_recompute_flags_is_refused(plan, name, flag):
    with pytest.raises(UserError, match=f"--adacc-plan {plan} decides what is recomputed, and so does {flag}"):
        strategies.get(plan).apply(arguments(**{name: "something"}))


def test_an_unknown_plan_lists_the_known_ones():
    with pytest.raises(UserError, match="--adacc-plan is 'fulll', but the known plans are off, full, selective"):
        strategies.get("fulll")
