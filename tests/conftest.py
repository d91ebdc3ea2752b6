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
    "scripts/test_demo.py",
    "test_readme.py",
    "megatron/test_auto.py",
    "megatron/test_adaptation.py",
    "megatron/test_faults.py",
    "megatron/test_plans.py",
    "megatron/test_run.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first (scripts/test.sh has xdist keep this order), and `gpu` skipped where there is none."""
    order = {Path(__file__).parent / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path, len(FIRST)))
    skip_without_gpu(items)


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
