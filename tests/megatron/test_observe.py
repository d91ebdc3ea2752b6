"""What a run logs and reports about its memory."""

import pytest


def test_console_tensorboard_and_report_say_the_same(trained, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trained(plan="selective", iterations=3, tensorboard_dir=tmp_path / "tb", log_interval=1)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    rows = run.report["iterations"]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    for tag, key in (
        ("adacc/held-bytes", "held_bytes"),
        ("adacc/peak-bytes", "peak_bytes"),
        ("adacc/peak-rss-bytes", "peak_rss_bytes"),
    ):
        scalars = {event.step: event.value for event in events.Scalars(tag)}
        # TensorBoard keeps 32-bit floats.
        assert scalars == pytest.approx({row["iteration"]: row[key] for row in rows}, rel=1e-6)
    for layer, held in run.report["layer_held_bytes"].items():
        assert events.Scalars(f"adacc/held-bytes/{layer}")[-1].value == held
    lines = [line for line in run.text.splitlines() if line.startswith(" adacc iteration")]
    assert len(lines) == 3
    assert f"held for backward (MiB): {rows[-1]['held_bytes'] / 2**20:.1f} |" in lines[-1]
    assert "plan: selective" in lines[-1]


def test_figures_are_consistent(trained):
    run = trained(plan="off", iterations=3)
    summary, layers = run.summary, run.report["layer_held_bytes"]
    assert set(summary) == {
        "strategy",
        "iterations",
        "final_lm_loss",
        "step_ms_median",
        "held_bytes",
        "peak_bytes",
        "peak_rss_bytes",
    }
    assert list(layers) == ["layer.1", "layer.2"]
    assert sum(layers.values()) < summary["held_bytes"] < summary["peak_bytes"] < summary["peak_rss_bytes"]
    assert summary["iterations"] == 3
    assert summary["final_lm_loss"] == run.losses[-1]
    assert run.report["run"]["num_layers"] == 2


@pytest.mark.distributed
def test_a_pipeline_reports_the_layers_and_bytes_of_all_its_ranks(trained):
    run = trained(plan="off", ranks=2, iterations=2, pipeline_model_parallel_size=2)
    assert sorted(run.report["layer_held_bytes"]) == ["layer.1", "layer.2"]
    assert [rank["rank"] for rank in run.report["ranks"]] == [0, 1]
    assert run.summary["held_bytes"] == max(rank["held_bytes"] for rank in run.report["ranks"])


def test_the_last_iteration_is_reported_when_it_is_not_at_the_log_interval(trained):
    run = trained(iterations=5, log_interval=2)
    assert [row["iteration"] for row in run.report["iterations"]] == [2, 4, 5]


def test_steps_that_no_log_interval_has_reached_are_reported_at_the_end(trained):
    run = trained(iterations=9, log_interval=100, exit_interval=3)
    assert [row["iteration"] for row in run.report["iterations"]] == [3]
    assert run.losses[0] == trained(iterations=9, exit_interval=3).losses[2]


def test_weights_and_biases_gets_the_same_scalars(monkeypatch):
    import megatron.training as training

    from megatron_adacc.megatron.observe import Observer
    from megatron_adacc.megatron.report import Row

    logged = []

    class Writer:
        def log(self, values, step):
            logged.append((values, step))

    monkeypatch.setattr(training, "get_tensorboard_writer", lambda: None)
    monkeypatch.setattr(training, "get_wandb_writer", Writer)
    monkeypatch.setattr(training, "print_rank_last", lambda message: None)
    import types

    watcher = object.__new__(Observer)
    watcher._args = types.SimpleNamespace(adacc_plan="full")
    watcher._report = types.SimpleNamespace(layer_held_bytes={"layer.1": 7})
    watcher._say(Row(3, 1.0, 0, 2.0, 10, None, 30))
    assert logged == [
        ({"adacc/held-bytes": 10, "adacc/peak-rss-bytes": 30, "adacc/step-ms": 2.0, "adacc/held-bytes/layer.1": 7}, 3)
    ]
