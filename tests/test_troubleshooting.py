"""docs/troubleshooting.md quotes what the code says."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"


def quoted() -> list[str]:
    """First cells that are quotations."""
    return re.findall(r'^\| "(.*?)"', PAGE.read_text(), re.M)


@functools.cache
def sentences() -> list[str]:
    """All strings of the package, with ... for what is put into them."""
    found = []
    for path in [*(ROOT / "megatron_adacc").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-.0-9]*[a-z]", "...", node.value))
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "..." for p in node.values))
    return found


@pytest.mark.parametrize("quotation", quoted())
def test_somebody_says_it(quotation):
    parts = [part.strip() for part in quotation.split("...") if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
    assert any(pattern.search(sentence) for sentence in sentences()), quotation


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)h][^)]*)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
