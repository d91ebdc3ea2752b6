"""The section `optim` of the file that --adacc-config names."""

from argparse import Namespace

import pytest

from megatron_adacc.adaptive.config import Config
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.optim_settings import complete, floors

OPTIM = "plan: recompute\noptim: "


def completed(tmp_path, text: str, given: tuple[str, ...] = (), **settings: object) -> Namespace:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    defaults = {"adacc_config": str(path), "adacc_dgr_group_size": 1, "adacc_state_plan": "8"}
    args = Namespace(**{**defaults, "pipeline_model_parallel_size": 1, **settings})
    complete(args, list(given))
    return args


def test_names_become_flags_and_the_command_line_comes_first(tmp_path):
    text = OPTIM + "{macro_architecture: true, group_size: 6, precision_policy: {text: fp16}}"
    assert completed(tmp_path, text).adacc_dgr_group_size == 6
    args = completed(tmp_path, text, ("--adacc-dgr-group-size=3",), adacc_dgr_group_size=3)
    assert (args.adacc_dgr_group_size, args.adacc_precision_policy) == (3, {"text": "fp16"})
    assert completed(tmp_path, "plan: auto").adacc_precision_policy is None


def test_offload_by_its_names(tmp_path):
    text = OPTIM + "{macro_architecture: true, group_size: 2, offload: true, offload_dir: /from/file}"
    for given in (None, "/given"):
        args = completed(tmp_path, text, adacc_dgr_offload=False, adacc_dgr_offload_dir=given)
        assert args.adacc_dgr_offload is True
        assert args.adacc_dgr_offload_dir == (given or "/from/file")


def test_floors():
    names = {"chunk0.embedding.weight": 1, "chunk0.decoder.layers.0.a": 2, "chunk0.decoder.layers.1.a": 3}
    assert floors({"text": "fp8", "image": "fp32"}, names) == {1: 8, 2: 8, 3: 8}
    assert floors({"text": ["fp4", "fp16"]}, names) == {1: 32, 2: 4, 3: 16}
    assert floors({"image": "fp8"}, names) == {}
    with pytest.raises(UserError, match="is in layer 1"):
        floors({"text": ["fp4"]}, names)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("[]", "optim has to be names with values; it is \\[\\]."),
        (
            "{groups: 2}",
            "optim has no setting 'groups'; there are macro_architecture, group_size, offload, offload_dir, precis",
        ),
        ("{macro_architecture: 1}", "macro_architecture has to be true or false; it is 1."),
        (
            "{macro_architecture: true, group_size: 0}",
            "group_size has to be a whole number of groups, 1 or more",
        ),
        ("{macro_architecture: true}", "macro_architecture needs group_size, the number of groups."),
        ("{group_size: 2}", "group_size is for macro_architecture: true; add that, or leave group_size out."),
        ("{offload: 1}", "offload has to be true or false; it is 1."),
        ("{offload: true}", "offload is for macro_architecture: true; add that, or leave offload out."),
        ("{offload_dir: /scratch}", "offload_dir is for offload: true; add that, or leave offload_dir out."),
        ("{offload_dir: 3}", "offload_dir has to be the path of a folder; it is 3."),
        ("{precision_policy: fp16}", "precision_policy has to be modalities with formats; it is 'fp16'."),
        ("{precision_policy: {text: int8}}", "precision_policy gives 'text' the value 'int8'; it is one of fp32, fp16"),
    ],
)
def test_what_is_refused(tmp_path, section, sentence):
    with pytest.raises(UserError, match=sentence):
        completed(tmp_path, OPTIM + section)


def test_a_policy_needs_a_state_plan_and_a_list_one_stage(tmp_path):
    with pytest.raises(UserError, match="the plan full keeps 32 bits everywhere: give --adacc-state-plan as well"):
        completed(tmp_path, OPTIM + "{precision_policy: {text: fp16}}", adacc_state_plan="full")
    with pytest.raises(UserError, match="which pipeline stages number each for themselves: give one format for all"):
        completed(tmp_path, OPTIM + "{precision_policy: {text: [fp16]}}", pipeline_model_parallel_size=2)


def test_elsewhere_the_section_is_not_passed_over(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(OPTIM + "{}")
    with pytest.raises(UserError, match="Adaptation has no setting 'optim'"):
        Config.load(path)
