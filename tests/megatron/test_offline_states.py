"""The optimizer's state in `adacc plan`: what the job's own optimizer offers, and the job's own solver's answer."""

import json
from dataclasses import replace

import pytest
import torch

from megatron_adacc import cli
from megatron_adacc.cost.devices import device
from megatron_adacc.cost.limits import Limit
from megatron_adacc.errors import UserError
from megatron_adacc.megatron import joint_states, offline_states, planning
from megatron_adacc.megatron.offline_facts import OfflineJob, learn
from megatron_adacc.megatron.state_plan import StateAdamW
from megatron_adacc.runtime.setting import Setting
from megatron_adacc.runtime.stage_solver import StageSolver

SMALL = [
    *("--num-layers", "3", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--micro-batch-size", "2", "--vocab-size", "127", "--transformer-impl", "local", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion", "--no-create-attention-mask-in-dataloader"),
]
JOINT = ("--adacc-state-plan", "auto")


@pytest.fixture(scope="module")
def plain() -> OfflineJob:
    """Traced once; `with_flags` has it with other state flags."""
    return learn(SMALL, device("v100-32gb"))


def with_flags(plain: OfflineJob, *flags: str) -> OfflineJob:
    offline_states.complete(plain.args, flags)
    (stage,) = plain.stages
    state = offline_states.state_of(plain.args, plain.job, 0)
    offer = state.offer
    room = stage.counted if offer is None else offer.room(stage.counted, max(form.bytes for form in offer.forms))
    return replace(plain, stages=(replace(stage, room=room, state=state),))


def optimizer_of(job: OfflineJob, bits: int = 32) -> StateAdamW:
    """The job's own, on parameters that take no memory."""
    (chunk,) = job.job.tensors(0)
    parameters = [torch.empty(t.elements, device="meta", requires_grad=True) for t in chunk]
    return StateAdamW([{"params": parameters}], bits, {}, None, 0)


@pytest.mark.parametrize(
    ("limit", "flags", "bits"),
    [
        ("6MiB", JOINT, 32),
        ("3400KiB", JOINT, None),
        ("3400KiB", (*JOINT, "--adacc-state-price", "0.0001"), 4),
        ("3400KiB", (*JOINT, "--adacc-state-price", "10"), None),
        ("3400KiB", ("--adacc-state-plan", "8"), 8),
    ],
)
def test_the_plan_is_that_of_the_job_s_own_solver_at_the_same_prices(plain, limit, flags, bits):
    job = with_flags(plain, *flags)
    (stage,) = job.stages
    own = joint_states.offer([optimizer_of(job, 8)], job.args, [])
    offered = stage.state.offer
    assert offered is not None
    assert replace(offered, allow=own.allow) == own
    assert len(offered.forms) == (1 if flags[1] == "8" else 25)
    allowed: list[int] = []
    states = replace(own, allow=allowed.append)
    setting = Setting(limit=Limit.parse(limit), room=lambda device: stage.counted, states=states)
    solved = StageSolver(setting).solve(stage.facts)
    found = planning.auto(job, Limit.parse(limit))
    assert found.plans[0].plan == solved.plan
    assert found.state_bytes == tuple(allowed)
    assert found.fits
    assert found.peak_bytes == solved.predicted.peak_bytes <= Limit.parse(limit).total_bytes
    if bits is not None:
        assert stage.state.bits_in(allowed[0]) == bits


def test_state_gives_what_activations_lack(plain):
    """The less an error costs, the fewer bits; with exact state alone more is recomputed, or nothing fits."""
    limit = Limit.parse("3400KiB")
    cheap, dear = (
        planning.auto(with_flags(plain, *JOINT, "--adacc-state-price", price), limit) for price in ("0.0001", "10")
    )
    alone = planning.auto(with_flags(plain), limit)
    assert cheap.state_bytes < dear.state_bytes
    assert cheap.step_us < dear.step_us
    assert alone.state_bytes == ()
    assert not alone.fits or alone.step_us >= dear.step_us
    job = with_flags(plain, *JOINT)
    assert planning.least_bytes(job) < planning.least_bytes(with_flags(plain))
    refused = planning.auto(job, Limit.parse("1MiB"))
    assert refused.refusal is not None
    assert refused.state_bytes == (job.stages[0].state.offer.least_bytes,)


def test_uniform_bits_limits_and_groups_are_the_job_s_offer(plain):
    elements = plain.job.parameters(0)
    exact = with_flags(plain).stages[0]
    assert exact.state.offer is None
    assert exact.room == exact.counted
    for bits in ("16", "8", "4"):
        job = with_flags(plain, "--adacc-state-plan", bits)
        optimizer = optimizer_of(job, int(bits))
        (form,) = joint_states.offer([optimizer], job.args, []).forms
        (stage,) = job.stages
        assert stage.state.offer.forms == [form]
        assert form.bytes == optimizer.state_bytes() == stage.state.moments[int(bits)]
        assert stage.room.fixed_bytes == exact.counted.fixed_bytes - 8 * elements + form.bytes
    static = exact.state.static
    (half,) = with_flags(plain, *JOINT, "--adacc-state-limit", "70%").stages
    assert half.state.offer.forms[0].bytes == 7 * static.total // 10 - (static.total - 8 * elements)
    assert half.state.bits_in(half.state.offer.forms[0].bytes) == 8
    groups = ("--adacc-dgr-group-size", "3")
    waits, away = (with_flags(plain, *groups, *more).stages[0] for more in ((), ("--adacc-dgr-offload",)))
    assert waits.state.offer.forms[0].bytes == 8 * elements + waits.state.waiting_bytes
    assert away.state.away_bytes == 8 * elements
    assert 8 * elements // 3 < away.state.offer.forms[0].bytes - away.state.waiting_bytes < 8 * elements // 2


def test_what_the_job_refuses_is_refused(plain):
    for flags, sentence in (
        (("--adacc-state-plan", "7"), "--adacc-state-plan is '7', but the known ones are full"),
        (("--adacc-dgr-offload",), "give --adacc-dgr-group-size 2 or more as well"),
        ((*JOINT, "--adacc-state-limit", "30%"), "--adacc-state-limit 30% is too little: with 4 bits everywhere"),
    ):
        with pytest.raises(UserError, match=sentence):
            with_flags(plain, *flags)
    with pytest.raises(UserError, match="The limit is 25 % of the plain activations, of which the optimizer's"):
        planning.auto(with_flags(plain, *JOINT), Limit.parse("25%"))


def test_the_table_and_figures_show_static_bytes_with_and_without(capsys):
    arguments = ["plan", "--device", "v100-32gb", *SMALL, "--adacc-state-plan", "8", "--adacc-dgr-group-size", "3"]
    assert cli.main([*arguments, "--adacc-dgr-offload", "--json", "-"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    static = stage["static"]
    parts = ("parameters", "gradients", "master", "moments")
    assert static["total_bytes"] == sum(static[name] for name in parts)
    assert static["planned_bits"] == 8
    assert static["planned_total_bytes"] == (
        static["total_bytes"] - static["moments"] + static["planned_moments"] + static["planned_waiting"]
    )
    assert static["planned_moments"] < static["planned_away"] < static["moments"] / 3
    assert cli.main(arguments) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("total with it ") for line in lines)
    assert "bits of most blocks at first 8" in lines
    assert not any(line.startswith("elsewhere") for line in lines)
