"""The handle between steps: warm-up, eval passes, state, and which layers a model has."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from drifting import HIDDEN, ROWS, Stack, grow, train
from torch import nn

from megatron_adacc import enable_memory_optim
from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.adaptive.policies import layers_of
from megatron_adacc.errors import UserError

NORM = "norm/native_layer_norm.0"


def test_a_lossy_plan_comes_after_the_warm_up():
    model, plain = Stack(), Stack()
    lossless: list[bool] = []
    handle = enable_memory_optim(model, {"warmup_steps": 5, "max_interval": 64})
    with handle:

        def end(loss: torch.Tensor) -> None:
            lossless.append(handle.plan.lossless)
            handle.step(loss)

        losses = train(model, range(1, 5), end)
        # Columns are reserved for the outliers of the tensors after the warm-up, not of the first steps.
        losses += train(model, range(5, 6), end, lambda step: grow(model.layers[1], 3))
        assert losses[:4] == train(plain, range(1, 5), lambda loss: None)
        assert handle.attached.traced_forwards == 2
        train(model, range(6, 9), end)
        assert lossless == [True] * 5 + [False] * 3
        assert handle.attached.traced_forwards == 4
        assert 3 in handle.outlier_lists()[1, NORM]
    (decision,) = handle.decisions
    assert str(decision) == (
        "step 5: 5 steps of warm-up have ended. from the next step on the plan is 'compress' and may be lossy; "
        "next check after step 6."
    )
    assert handle.schedule.next_check == 9  # after 6, 7


@pytest.mark.parametrize("plan", ["recompute", "compress", "auto"])
def test_under_autocast(plan):
    """bfloat16 inside the layers: a lossless plan trains as without us, a lossy one is checked and stays near."""
    lossy = plan == "compress"
    settings = {"plan": plan, "warmup_steps": 2, "check_gradients_every": 2 * lossy}
    settings |= {"limit": "40%"} if plan == "auto" else {}

    class Rounded(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    model = Rounded()
    plain = train(Rounded(), range(1, 7), lambda loss: None)
    with enable_memory_optim(model, settings) as handle:
        found = train(model, range(1, 7), handle.step)
        assert {b.base.dtype for graph in handle.attached.graphs for b in graph.buffers} >= {"bfloat16", "float32"}
        assert handle.plan.lossless != lossy
    if lossy:
        assert found[:2] == plain[:2]
        assert found != plain
        assert found == pytest.approx(plain, rel=0.02)
        assert 0 < max(comparison.error for _, _, comparison in handle.compared) < 0.3
    else:
        assert found == plain


@pytest.mark.parametrize("plan", ["keep", "recompute"])
def test_a_lossless_plan_needs_no_warm_up(plan):
    model = Stack()
    with enable_memory_optim(model, {"warmup_steps": 2, "plan": plan}) as handle:
        train(model, range(1, 5), handle.step)
        assert handle.plan.lossless
        assert handle.plan.name == plan
        assert handle.attached.traced_forwards == 2
    assert handle.decisions == []


def test_compression_levels_choose_the_codecs():
    model = Stack()
    levels = {"Linear": "direct"}
    with enable_memory_optim(model, {"warmup_steps": 0, "compression_levels": levels}) as handle:
        train(model, range(1, 3), handle.step)
        actions = {site: str(action) for layer in handle.plan.layers for site, action in layer.actions}
    assert actions[NORM] == "compress(group_int4)"
    model = Stack()
    with enable_memory_optim(model, {"warmup_steps": 0, "compression_levels": {"Linear": "none"}}) as handle:
        train(model, range(1, 3), handle.step)
        assert NORM not in {site for layer in handle.plan.layers for site, _ in layer.actions}


@pytest.mark.parametrize("gradients", [False, True])
def test_an_eval_pass_changes_nothing(gradients):
    """Between steps that are checked, without gradients and with: the same losses, lists and schedule."""

    def run(with_eval: bool) -> tuple[list[float], dict, AdaptiveHandle]:
        model = Stack()
        with enable_memory_optim(model, {"warmup_steps": 3}) as handle:

            def before(step: int) -> None:
                if not with_eval:
                    return
                model.eval()
                with torch.set_grad_enabled(gradients):
                    evaluated = model(100 * torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(step)))
                if not gradients:
                    assert handle.stored_bytes() == 0
                del evaluated
                model.train()
                assert handle.stored_bytes() == 0

            losses = train(model, range(1, 13), handle.step, before)
            lists = handle.outlier_lists()
        return losses, lists, handle

    losses, lists, handle = run(with_eval=False)
    others = run(with_eval=True)
    assert losses == others[0]
    assert lists == others[1]
    assert (handle.steps, handle.schedule, handle.decisions) == (
        others[2].steps, others[2].schedule, others[2].decisions,
    )  # fmt: skip
    assert handle.steps == 12


def test_a_jump_of_the_loss_takes_the_interval_back():
    model = Stack()
    with enable_memory_optim(model, {"warmup_steps": 0}) as handle:
        for step in range(1, 41):
            handle.step(2.0 if step < 40 else 2.4)
        assert handle.schedule.next_check == 41
        assert str(handle.decisions[0]) == "step 40: the loss jumped to 2.4 from a mean of 2. next check after step 41."


def test_memory_above_its_share_is_a_decision():
    model = Stack()
    attached = enable_memory_optim(model, {"warmup_steps": 0})
    handle = AdaptiveHandle(attached.attached, attached.config, peak_share=lambda: 0.93)
    with handle:
        for _ in range(4):
            handle.step()
    assert [decision.step for decision in handle.decisions] == [1]
    assert "memory had a peak of 93% of the device, above 90%" in str(handle.decisions[0])


def test_state_goes_through_json_and_goes_on(tmp_path):
    model = Stack()
    with enable_memory_optim(model, {"warmup_steps": 4, "max_interval": 4}) as handle:
        train(model, range(1, 12), handle.step, lambda step: grow(model.layers[0], 9) if step == 7 else None)
        state = json.loads(json.dumps(handle.state_dict()))
        lists, report = handle.outlier_lists(), handle.report()
    assert lists[0, NORM] == (9,)
    assert [d[0] for d in state["decisions"]] == [4, 8]

    other = Stack()
    other.load_state_dict(model.state_dict())
    with enable_memory_optim(other, {"warmup_steps": 4, "max_interval": 4}) as handle:
        handle.load_state_dict(state)
        assert handle.steps == 11
        assert handle.schedule.to_data() == state["schedule"]
        train(other, range(12, 14), handle.step)
        # It is in the lossy stage, with the plan and the lists of the state: no warm-up is spent again.
        assert handle.plan.to_json() == state["plan"]
        assert not handle.plan.lossless
        assert handle.outlier_lists() == lists
        assert handle.report().splitlines()[-1] == report.splitlines()[-1]
        assert [d.step for d in handle.decisions] == [4, 8]


@pytest.mark.parametrize("state", [{}, {"steps": "x"}])
def test_a_state_that_is_none(state):
    with enable_memory_optim(Stack(), {}) as handle, pytest.raises(UserError, match="This is no state of an adaptive"):
        handle.load_state_dict(state)


def test_layers_of_a_model():
    model = Stack(3)
    assert layers_of(model) == list(model.layers)
    assert layers_of(model.layers) == layers_of(list(model.layers)) == list(model.layers)
    assert layers_of(model.layers[0]) == [model.layers[0]]
    nested = nn.ModuleDict({"encoder": Stack(2), "decoder": nn.ModuleList([Stack(1), Stack(1)])})
    assert layers_of(nested) == [*nested["encoder"].layers, *nested["decoder"]]


def test_settings_come_from_a_file_too(tmp_path):
    path = tmp_path / "adaptation.yaml"
    path.write_text("warmup_steps: 7\n")
    for source in (path, str(path)):
        with enable_memory_optim(Stack(), source) as handle:
            assert handle.config.warmup_steps == 7


def test_after_detach_the_layers_are_as_before():
    model = Stack()
    handle = enable_memory_optim(model)
    train(model, range(1, 3), handle.step)
    handle.detach()
    handle.step(1.0)
    assert handle.steps == 2
    assert all("forward" not in layer.__dict__ for layer in model.layers)


def worker(rank: int, folder: str) -> None:
    """Rank r has one large channel, the second rank's larger; together it is the second's."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    model = Stack()
    grow(model.layers[0], (5, 9)[rank], (20.0, 60.0)[rank])
    with enable_memory_optim(model, {"warmup_steps": 0}, groups=[world]) as handle:
        train(model, range(1, 5), handle.step)
        found = {
            "list": handle.outlier_lists()[0, NORM],
            "checks": handle.schedule.to_data(),
            "decisions": [str(decision) for decision in handle.decisions],
        }
    Path(folder, f"rank{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_ranks_of_a_group_separate_the_same_channels_at_the_same_step(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert first["list"] == second["list"] == [9]
    assert first["checks"] == second["checks"]
    assert first["decisions"][0].startswith(f"step 1: layer 0 {NORM}: 0% of its outliers were in")
    assert first["decisions"] == second["decisions"]  # the second rank took the first's list, and then both another
