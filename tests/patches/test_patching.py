"""Patches: applied whole, taken back whole, refused where upstream is another."""

import sys
import types

import pytest

from megatron_adacc.errors import UserError
from megatron_adacc.patches import patching
from megatron_adacc.patches.patching import Patch


@pytest.fixture
def upstream(monkeypatch):
    """Two modules that look like upstream's: one defines a function and a class, the other imports the function."""
    module, importer = types.ModuleType("megatron.fake"), types.ModuleType("megatron.importer")
    exec(
        "def add(a, b):\n    return a + b\n\nclass Norm:\n    def __new__(cls, size):\n        return size",
        vars(module),
    )
    importer.add = module.add
    monkeypatch.setitem(sys.modules, "megatron.fake", module)
    monkeypatch.setitem(sys.modules, "megatron.importer", importer)
    return module, importer


def patch(symbol="add", parameters=("a", "b"), make=lambda original: lambda a, b: original(a, b) * 10):
    return Patch("megatron.fake", symbol, parameters, ("0.19.2",), make, "a test")


def test_a_function_is_replaced_wherever_it_was_imported_and_put_back(upstream):
    module, importer = upstream
    with patching.apply([patch()]):
        assert (module.add(1, 2), importer.add(1, 2)) == (30, 30)
    assert (module.add(1, 2), importer.add(1, 2)) == (3, 3)


def test_a_module_imported_meanwhile_gives_the_replacement_back(upstream, monkeypatch):
    module, _ = upstream
    late = types.ModuleType("megatron.late")
    with patching.apply([patch()]):
        late.add = module.add
        monkeypatch.setitem(sys.modules, "megatron.late", late)
        assert late.add(1, 2) == 30
    assert late.add(1, 2) == 3


def test_new_stays_a_static_method(upstream):
    module, _ = upstream
    replaced = patch("Norm.__new__", ("cls", "size"), lambda original: lambda cls, size: original(cls, size) + 1)
    with patching.apply([replaced]):
        assert module.Norm(4) == 5
    assert module.Norm(4) == 4


@pytest.mark.parametrize(
    ("symbol", "parameters", "words"),
    [
        ("add", ("a", "b", "c"), r"megatron\.fake\.add of the installed megatron-core \S+ takes \(a, b\)"),
        ("gone", (), r"megatron\.fake\.gone does not exist in the installed megatron-core"),
        ("Norm.gone", (), r"megatron\.fake\.Norm\.gone does not exist"),
    ],
)
def test_another_upstream_is_refused_with_symbol_and_version_and_nothing_is_applied(
    upstream, symbol, parameters, words
):
    module, _ = upstream
    original = module.add
    with pytest.raises(UserError, match=words) as refused:
        patching.apply([patch(), patch(symbol, parameters)])
    assert "checked with megatron-core 0.19.2" in str(refused.value)
    with pytest.raises(UserError, match="does not exist in the installed megatron-core"):
        patching.apply([Patch("megatron.nowhere", "add", (), ("0.19.2",), lambda original: original, "a test")])
    assert module.add is original


def test_every_patch_of_ours_fits_the_installed_upstream():
    from megatron_adacc.patches import (
        core_datasets_utils,
        core_optimizer_distrib_optimizer,
        core_transformer_spec_utils,
        core_transformer_torch_norm,
        training_argument_utils,
        training_arguments,
        training_initialize,
        training_training,
    )

    def nothing(*_):
        return None

    patches = [
        *core_datasets_utils.patches(),
        *core_optimizer_distrib_optimizer.patches(),
        *core_transformer_spec_utils.patches(nothing),
        *core_transformer_torch_norm.patches(),
        *training_argument_utils.patches(nothing),
        *training_arguments.patches(nothing, nothing),
        *training_initialize.patches(),
        *training_training.patches(nothing),
    ]
    assert len({patch.name for patch in patches}) == len(patches) == 11
    patching.apply(patches).close()


def test_torch_norms_under_sequence_parallelism_mark_their_parameters():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_adacc.patches import core_transformer_torch_norm

    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "persist_layer_norm": False}
    config = TransformerConfig(**settings, sequence_parallel=True, tensor_model_parallel_size=2)
    with pytest.raises(AssertionError, match="sequence parallel not supported"):
        WrappedTorchNorm(config, 8)
    with patching.apply(core_transformer_torch_norm.patches()):
        norm = WrappedTorchNorm(config, 8, eps=1e-3)
        assert [p.sequence_parallel for p in norm.parameters()] == [True, True]
        assert norm.eps == 1e-3
        assert config.sequence_parallel
        plain = WrappedTorchNorm(TransformerConfig(**settings), 8)
        assert not any(hasattr(p, "sequence_parallel") for p in plain.parameters())


def test_the_compiled_index_helper_of_the_wheel_is_used(monkeypatch):
    import subprocess

    from megatron.core.datasets import utils

    from megatron_adacc.patches import core_datasets_utils

    called = []
    monkeypatch.setattr(
        subprocess, "run", lambda *args, **_: called.append(args) or types.SimpleNamespace(returncode=0)
    )
    with patching.apply(core_datasets_utils.patches()):
        utils.compile_helpers()
    assert called == []
    utils.compile_helpers()
    assert len(called) == 1
