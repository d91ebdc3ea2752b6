"""Large memory that the engine takes on a CPU comes in huge pages, and holds the same bits."""

import mmap
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_adacc import attach, huge_pages
from megatron_adacc.codecs.execute import empty_run
from megatron_adacc.graph import replay

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BYTES = 2**26


def faults_of_filling(take: Callable[[], Tensor]) -> int:
    """Page faults of taking and filling memory, the least of three times: the kernel may be short of huge pages."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        take().fill_(1)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found)


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="the kernel gives no transparent huge pages"
)
def test_filling_large_decoded_memory_faults_once_a_huge_page() -> None:
    small_pages = BYTES // mmap.PAGESIZE
    assert faults_of_filling(lambda: empty_run(BYTES // 4, torch.float32, torch.device("cpu"))) < small_pages / 8


def test_small_blocks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def madvise(*arguments: int) -> int:
        asked.append(arguments)
        return 0

    monkeypatch.setattr(huge_pages, "_madvise", lambda: madvise)
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 2**21)
    assert not huge_pages.advise(2**30, huge_pages.LEAST_BYTES - 1)
    assert not asked
    # Only whole huge pages inside the block.
    assert huge_pages.advise(2**30 + 64, 2**25)
    assert asked == [(2**30 + 2**21, 2**25 - 2**21, huge_pages.MADV_HUGEPAGE)]


def test_without_huge_pages_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert huge_pages.huge_page_bytes(tmp_path / "missing") == 0
    (tmp_path / "strange").write_text("many")
    assert huge_pages.huge_page_bytes(tmp_path / "strange") == 0
    monkeypatch.setattr(huge_pages, "huge_page_bytes", lambda: 0)
    assert not huge_pages.advise(0, 2**40)


class Attention(nn.Module):
    """Scores, softmax, dropout and two linear layers: [4, 8, 16] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(16, 32), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, dim=-1)
        probabilities = torch.dropout(torch.softmax(q @ k.transpose(1, 2), dim=-1), 0.1, True)
        return self.out(torch.nn.functional.gelu(probabilities @ x))


def test_ops_that_write_into_given_memory_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of the recipes that can be given its memory is, however small its result."""
    taken: list[torch.Size] = []
    huge = replay._huge

    def noting(view: object) -> Tensor:
        tensor = huge(view)
        taken.append(tensor.shape)
        return tensor.fill_(float("nan"))

    monkeypatch.setattr(replay, "LEAST_BYTES", 1)
    monkeypatch.setattr(replay, "_huge", noting)
    torch.manual_seed(0)
    layer, x = Attention(), torch.randn(4, 8, 16, requires_grad=True)

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        return list(torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]))

    plain = gradients()
    with attach(layer, "recompute", min_bytes=1):
        for step in range(4):
            if step == 3:
                taken.clear()
            assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))
    assert {(4, 8, 8), (4, 8, 16), (32, 32)} <= {tuple(size) for size in taken}
