"""Settings of adaptation: the paper's names and values, and a sentence for what is not right."""

from dataclasses import FrozenInstanceError

import pytest

from megatron_adacc.adaptive.config import Config
from megatron_adacc.errors import UserError

PAPER = """
warmup_steps: 100
min_interval: 1
max_interval: 64
outlier_threshold: 3.0
compression_levels:
  Linear: outlier_separated
  Attention: channel_wise
"""


def test_the_papers_settings_are_the_defaults():
    assert Config.from_yaml(PAPER) == Config() == Config.from_yaml("") == Config.from_mapping({})
    config = Config()
    assert (config.warmup_steps, config.min_interval, config.max_interval) == (100, 1, 64)
    assert (config.outlier_threshold, config.loss_jump, config.memory_share) == (3.0, 0.15, 0.9)
    assert dict(config.compression_levels) == {"Linear": "outlier_separated", "Attention": "channel_wise"}
    assert (config.plan, config.limit, config.error_budget) == ("compress", None, 0.0)


def test_from_a_mapping_and_a_file(tmp_path):
    given = {"plan": "auto", "limit": "25%", "error_budget": 0.02, "warmup_steps": 0}
    path = tmp_path / "adaptation.yaml"
    path.write_text("plan: auto\nlimit: 25%\nerror_budget: 0.02\nwarmup_steps: 0\n")
    assert Config.load(path) == Config.from_mapping(given)
    assert Config.load(path).limit == "25%"


def test_it_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Config().max_interval = 8


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_intervall": 8}, "Adaptation has no setting 'max_intervall'; did you mean 'max_interval'?"),
        ({"zzz": 8}, "Adaptation has no setting 'zzz'; there are warmup_steps, min_interval, "),
        ({"warmup_steps": -1}, "warmup_steps has to be a whole number of steps, 0 or more; it is -1."),
        ({"warmup_steps": True}, "warmup_steps has to be a whole number of steps, 0 or more; it is True."),
        ({"min_interval": 0}, "min_interval has to be a whole number of steps, 1 or more; it is 0."),
        ({"max_interval": "8"}, "max_interval has to be a whole number of steps, 1 or more; it is '8'."),
        ({"min_interval": 9, "max_interval": 8}, "min_interval has to be at most max_interval; they are 9 and 8."),
        ({"outlier_threshold": 0}, "outlier_threshold has to be a number above 0; it is 0."),
        ({"outlier_threshold": float("nan")}, "outlier_threshold has to be a number above 0; it is nan."),
        ({"overlap": 1.5}, "overlap has to be a share from 0 to 1; it is 1.5."),
        ({"error_band": 1}, "error_band has to be a factor above 1; it is 1."),
        ({"loss_jump": 0.0}, "loss_jump has to be a number above 0; it is 0.0."),
        ({"memory_share": 1.2}, "memory_share has to be a share above 0, at most 1; it is 1.2."),
        ({"error_budget": -0.1}, "error_budget has to be a number, 0 or more; it is -0.1."),
        ({"limit": 30}, "limit has to be text such as '30GiB' or '25%'; it is 30."),
        ({"plan": 3}, "plan has to be the name of a plan or the path of a plan file; it is 3."),
        ({"compression_levels": "int4"}, "compression_levels has to be a level for Linear, for Attention, or for both"),
        ({"compression_levels": {"Conv": "direct"}}, "compression_levels are for Linear and Attention; there is no 'C"),
        ({"compression_levels": {"Linear": "int4"}}, "The compression level of Linear has to be one of outlier_separ"),
        ({"plan": "recompute", "compression_levels": {"Linear": "none"}}, "compression_levels are for the plan 'compr"),
        ({"limit": "25%"}, "limit is for the plan 'auto'; the plan 'compress' does not look at it: leave it out."),
        ({"error_budget": 0.1}, "error_budget is for the plan 'auto'; the plan 'compress' does not look at it: "),
    ],
)
def test_what_is_not_right_is_said_in_a_sentence(settings, sentence):
    with pytest.raises(UserError) as raised:
        Config.from_mapping(settings)
    assert str(raised.value).startswith(sentence)


def test_text_and_files_that_hold_no_settings(tmp_path):
    with pytest.raises(UserError, match="have to be YAML; these are not"):
        Config.from_yaml("a: [1")
    with pytest.raises(UserError, match="have to be names with values; they are"):
        Config.from_yaml("- 1")
    with pytest.raises(UserError, match=r"missing.yaml cannot be read: No such file or directory\."):
        Config.load(tmp_path / "missing.yaml")
    (tmp_path / "wrong.yaml").write_text("plans: auto\n")
    with pytest.raises(UserError, match=r"wrong.yaml: Adaptation has no setting 'plans'; did you mean 'plan'\?"):
        Config.load(tmp_path / "wrong.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"bytes.yaml has to be text in UTF-8; it is not\."):
        Config.load(tmp_path / "bytes.yaml")
