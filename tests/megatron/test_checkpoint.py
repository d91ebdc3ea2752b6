"""Save and resume: the losses of a run never stopped; a checkpoint that needs nothing of ours."""

import pickletools
import shutil
import subprocess
import sys

import pytest

SETTINGS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        ("off", {"ckpt_format": "torch_dist"}),
        ("full", {"ckpt_format": "torch"}),
        ("full", {"ckpt_format": "torch_dist", "use_distributed_optimizer": True}),
    ],
    ids=["off-torch_dist", "full-torch", "full-distributed-optimizer"],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(trained, tmp_path, plan, extra):
    settings = {**SETTINGS, **extra, "plan": plan}
    whole = trained(iterations=6, save=tmp_path / "c", save_interval=3, **settings)
    # As if it had been killed after its third iteration.
    shutil.rmtree(tmp_path / "c" / "iter_0000006")
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = trained(iterations=6, load=tmp_path / "c", **settings)
    assert len(resumed.losses) == 3
    assert resumed.losses == whole.losses[3:]


def test_a_run_resumes_with_another_plan(trained, tmp_path):
    whole = trained(iterations=6, **SETTINGS)
    trained(iterations=6, plan="full", exit_interval=3, save=tmp_path / "c", save_interval=3, **SETTINGS)
    resumed = trained(iterations=6, plan="selective", load=tmp_path / "c", **SETTINGS)
    assert resumed.losses == whole.losses[3:]


def test_a_checkpoint_loads_without_us(trained, tmp_path):
    trained(iterations=2, plan="full", save=tmp_path / "c", save_interval=2, ckpt_format="torch", **SETTINGS)
    (path,) = (tmp_path / "c").rglob("model_optim_rng.pt")
    # A Python that cannot import us unpickles the arguments, and finds the plan as a string.
    program = (
        "import sys, torch; sys.modules['megatron_adacc'] = None\n"
        f"args = torch.load({str(path)!r}, weights_only=False)['args']\n"
        "assert type(args.adacc_plan) is str and args.adacc_plan == 'full'\n"
        "assert {type(v).__module__ for k, v in vars(args).items() if k.startswith('adacc')} == {'builtins'}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert b"megatron_adacc" not in pickle_strings(path)


def pickle_strings(path):
    """All strings of the pickle inside a torch checkpoint: a class of ours would be named there."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        operations = pickletools.genops(archive.read(name))
        return b"\n".join(str(argument).encode() for _, argument, _ in operations if argument is not None)
