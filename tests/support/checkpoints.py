"""What a checkpoint of a test's training holds."""

import torch


def tensors(value, path=""):
    """All tensors of a checkpoint, by path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{path}/{index}")


def checkpoint(folder, iteration=3):
    """Weights, moments of the gradients, generator states: every tensor of every rank's file."""
    found = {}
    for file in sorted((folder / f"iter_{iteration:07d}").rglob("*.pt")):
        state = torch.load(file, weights_only=False)
        found |= {f"{file.relative_to(folder)}{path}": tensor for path, tensor in tensors(state)}
    assert any("exp_avg_sq" in path for path in found)
    assert any("rng_state" in path for path in found)
    return found
