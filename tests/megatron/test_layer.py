"""AdaccTransformerLayer in Megatron's specs."""

import pytest
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron_adacc.megatron.layer import AdaccMark, AdaccTransformerLayer, marked


def test_marked():
    assert marked(TransformerLayer) is AdaccTransformerLayer
    assert marked(AdaccTransformerLayer) is AdaccTransformerLayer
    assert marked(dict) is dict
    moe = marked(MoETransformerLayer)
    assert issubclass(moe, MoETransformerLayer)
    assert issubclass(moe, AdaccMark)
    assert moe.__name__ == "AdaccMoETransformerLayer"
    assert marked(MoETransformerLayer) is moe


@pytest.mark.parametrize("spec", ["local", "class", "path"])
def test_whatever_names_the_layer_builds_ours(spec):
    from megatron_adacc.patches import core_transformer_spec_utils, patching

    specs = {
        "local": ModuleSpec(module=TransformerLayer, params={"layer": 1}, submodules="parts"),
        "class": TransformerLayer,
        "path": ModuleSpec(
            module=("megatron.core.transformer.transformer_layer", "TransformerLayer"), submodules="parts"
        ),
    }
    built = []

    class Recorder:
        def __init__(self, **settings):
            built.append(settings)

    def replace(module):
        return Recorder if module is TransformerLayer else module

    from megatron.core.transformer import spec_utils

    with patching.apply(core_transformer_spec_utils.patches(replace)):
        spec_utils.build_module(specs[spec], config="c")
        assert isinstance(spec_utils.build_module(dict, a=1), dict)
    expected = {"config": "c"}
    if spec != "class":
        expected["submodules"] = "parts"
    if spec == "local":
        expected["layer"] = 1
    assert built == [expected]
    assert spec_utils.build_module is build_module
