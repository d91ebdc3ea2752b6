"""The choices that docs/codecs.md draws from its table still follow from the figures."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "codecs" / "errors.py"


@pytest.fixture(scope="module")
def errors() -> dict[str, dict[str, float]]:
    """Row title -> column title -> relative squared error."""
    spec = importlib.util.spec_from_file_location("codec_errors", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tensors = script.samples()
    return {
        title: {kind: script.error(name, options, x) for kind, x in tensors.items()}
        for title, (name, options) in script.COLUMNS.items()
    }


def test_signed_is_better_than_the_papers_scale_everywhere(errors) -> None:
    for bits in (2, 4, 8):
        for kind, error in errors[f"int{bits} signed"].items():
            assert error < errors[f"int{bits} paper"][kind], (bits, kind)
    assert errors["int4 paper"]["normal"] == pytest.approx(1.12e-2, rel=0.02)
    assert errors["int4 signed"]["normal"] == pytest.approx(1.08e-2, rel=0.02)


def test_affine_is_for_one_sided_tensors(errors) -> None:
    for kind in ("softmax rows", "GELU output"):
        assert errors["affine int4"][kind] < errors["int4 signed"][kind] / 3
    assert errors["affine int4"]["normal, planted"] > errors["int4 signed"]["normal, planted"]


def test_outlier_separation_pays_where_there_are_outliers(errors) -> None:
    for kind in ("normal", "Laplace", "GELU output", "softmax rows"):
        assert errors["outlier int4"][f"{kind}, planted"] < errors["int4 signed"][f"{kind}, planted"] / 10
        assert errors["outlier int4"][kind] == pytest.approx(errors["int4 signed"][kind], rel=0.05)


def test_a_scale_for_each_run_of_rows_beats_one_for_all(errors) -> None:
    for kind, error in errors["channel int4, 128 rows"].items():
        assert error < errors["channel int4, all rows"][kind] / 1.25
