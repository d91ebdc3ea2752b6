"""What every test shares: the environment that child processes inherit, and the skip for GPU tests."""

import os
from pathlib import Path

import pytest

# Set before any test module imports torch, and inherited by every process that a test starts. Several
# ranks on a small machine are slower with more threads than cores, and no test may ask a hub for a file.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
# A worker of pytest-xdist sets it, and tables would be cut to it.
os.environ.pop("COLUMNS", None)


# Files whose tests start processes of their own, longest first: a worker that got one of them last would be left alone
# with it at the end.
FIRST = (
    "patches/test_patching.py",  # before anything in its process could have left a patch behind
    "scripts/test_demo.py",
    "test_readme.py",
    "megatron/test_auto.py",
    "megatron/test_adaptation.py",
    "megatron/test_faults.py",
    "megatron/test_plans.py",
    "megatron/test_run.py",
)


# Marked `slow`: further layouts, formats and precisions of what another case of the same test shows at every run.
SLOW = (
    "kernels/test_offline.py::test_every_kernel_compiles[all]",
    "megatron/test_adaptation.py::test_a_checkpoint_of_another_layout_is_said_not_to_fit",
    "megatron/test_adaptation.py::test_a_checkpoint_resumes_on_another_data_parallel_size",
    "megatron/test_adaptation.py::test_a_lossy_plan_comes_after_the_warm_up",
    "megatron/test_adaptation.py::test_a_lossy_run_resumes_with_the_losses_of_one_never_stopped[torch_dist-stops1]",
    "megatron/test_adaptation.py::test_gradients_are_compared_and_bad_layers_become_exact",
    "megatron/test_adaptation.py::test_two_ranks_with_a_lossy_plan_decide_alike_and_resume_exactly[dp]",
    "megatron/test_adaptation.py::test_two_ranks_with_a_lossy_plan_decide_alike_and_resume_exactly[pp]",
    "megatron/test_adapters_command.py::test_peft_and_transformers_compute_what_megatron_does[gpt]",
    "megatron/test_auto.py::test_16_bits[bf16]",
    "megatron/test_auto.py::test_auto_leaves_the_checkpoint_of_a_plain_run[data]",
    "megatron/test_auto.py::test_auto_leaves_the_checkpoint_of_a_plain_run[interleaved]",
    "megatron/test_auto.py::test_auto_leaves_the_checkpoint_of_a_plain_run[one rank]",
    "megatron/test_auto.py::test_auto_leaves_the_checkpoint_of_a_plain_run[tensor]",
    "megatron/test_auto.py::test_predicted_peak_is_met_from_above[llama, bf16]",
    "megatron/test_auto.py::test_predicted_peak_is_met_from_above[sequence, half]",
    "megatron/test_auto.py::test_predicted_peak_is_met_from_above[sequence]",
    "megatron/test_auto.py::test_predicted_peak_is_met_from_above[tensor]",
    "megatron/test_auto.py::test_ranks_with_other_timings_hold_the_first_ones_plan[data]",
    "megatron/test_bases.py::test_a_plan_changes_no_bit_beside_any_base[gptq4]",
    "megatron/test_bases.py::test_a_plan_changes_no_bit_beside_any_base[int8]",
    "megatron/test_bases.py::test_two_tensor_parallel_ranks[int8-True]",
    "megatron/test_bases.py::test_two_tensor_parallel_ranks[nf4-double-False]",
    "megatron/test_checkpoint.py::test_a_resumed_run_has_the_losses_of_an_uninterrupted_one[full-distributed-optimizer]",
    "megatron/test_evaluate.py::test_scores_are_those_of_the_model[tensor-parallel]",
    "megatron/test_faults.py::test_a_run_that_is_killed_again_and_again_ends_like_one_never_killed[auto]",
    "megatron/test_faults.py::test_a_step_that_was_refused_memory_runs_again_with_the_same_bits[1]",
    "megatron/test_faults.py::test_a_step_that_was_refused_memory_runs_again_with_the_same_bits[40]",
    "megatron/test_faults.py::test_all_ranks_drop_a_step_in_which_one_held_too_much[dp]",
    "megatron/test_faults.py::test_refused_memory_at_every_pack_of_a_step_in_turn",
    "megatron/test_fsdp.py::test_megatrons_own_gathers[layers]",
    "megatron/test_fsdp.py::test_torch_fsdp2_under_a_lossy_plan_in_16_bits",
    "megatron/test_lora.py::test_two_ranks_train_the_adapters_of_one[gpt-sequence]",
    "megatron/test_lora.py::test_two_ranks_train_the_adapters_of_one[llama-tensor]",
    "megatron/test_parallel.py::test_two_ranks_agree_with_one[full-*",
    "megatron/test_plans.py::test_recompute_leaves_the_checkpoint_of_a_plain_run[gpt-pipeline]",
    "megatron/test_plans.py::test_recompute_leaves_the_checkpoint_of_a_plain_run[gpt-tensor]",
    "megatron/test_plans.py::test_recompute_leaves_the_checkpoint_of_a_plain_run[llama-interleaved]",
    "megatron/test_plans.py::test_recompute_leaves_the_checkpoint_of_a_plain_run[llama-pipeline]",
    "megatron/test_plans.py::test_recompute_leaves_the_checkpoint_of_a_plain_run[llama-sequence]",
    "megatron/test_plans.py::test_recompute_leaves_the_checkpoint_of_a_plain_run[llama-tensor]",
    "megatron/test_run.py::test_dropout_on_tensor_parallel_ranks_is_that_of_a_real_device[False]",
    "megatron/test_state_plan.py::test_a_resumed_run_has_the_losses_of_one_never_stopped_or_killed[fp32]",
    "megatron/test_state_plan.py::test_the_distributed_optimizer_resumes_and_goes_to_another_number_of_ranks[tp]",
    "megatron/test_state_plan.py::test_what_two_ranks_share_stays_alike[pipeline-fp16]",
)


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first (scripts/test.sh has xdist keep this order), and `gpu` skipped where there is none."""
    mark_slow(items, whole_files=not any("::" in argument for argument in config.args))
    order = {Path(__file__).parent / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(FIRST)))
    skip_without_gpu(items)


def mark_slow(items: list[pytest.Item], whole_files: bool) -> None:
    """Mark the tests of SLOW; a star at the end of an entry stands for anything. An entry for a test that its file no
    longer has is an error: under another name it would run every time, unseen."""
    folder = Path(__file__).parent
    names = {item: f"{item.path.relative_to(folder).as_posix()}::{item.nodeid.rpartition('::')[2]}" for item in items}
    for entry in SLOW:
        found = [i for i, n in names.items() if n == entry or (entry.endswith("*") and n.startswith(entry[:-1]))]
        for item in found:
            item.add_marker(pytest.mark.slow)
        file = entry.partition("::")[0]
        if whole_files and not found and any(name.startswith(f"{file}::") for name in names.values()):
            raise pytest.UsageError(f"tests/conftest.py: SLOW names {entry}, and there is no such test in its file.")


def skip_without_gpu(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where torch sees no CUDA device, and say what torch said."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = (
        f"needs a CUDA device: torch {torch.__version__} (CUDA {torch.version.cuda}) sees none "
        "(torch.cuda.is_available() is False)"
    )
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason=reason))
