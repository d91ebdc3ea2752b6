"""Memory limits: what people write, and the least limit that is written back."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_adacc.cost.limits import Limit, least_written, written_bytes
from megatron_adacc.errors import UserError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("30GiB", 30 * 2**30), ("30 gib", 30 * 2**30), ("512MB", 512 * 10**6), ("1.5KiB", 1536), ("0B", 0),
        ("0.1B", 0), (" 2TB ", 2 * 10**12), ("3tib", 3 * 2**40),
    ],
)  # fmt: skip
def test_bytes(text: str, nbytes: int) -> None:
    assert Limit.parse(text) == Limit(total_bytes=nbytes)


@pytest.mark.parametrize(("text", "share"), [("25%", "1/4"), ("0 %", "0"), ("100%", "1"), ("14.66%", "733/5000")])
def test_shares_are_exact(text: str, share: str) -> None:
    assert Limit.parse(text) == Limit(share=Fraction(share))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("30", "a unit is missing"), (30, "a unit is missing"), ("-5%", "cannot be read"), ("", "cannot be read"),
        ("nan%", "cannot be read"), ("1e9B", "cannot be read"), ("\uff11\uff10%", "cannot be read"),
        ("30XB", "unknown unit"), ("100.01%", "between 0% and 100%"), ("inf GB", "cannot be read"),
        (None, "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_limit(text: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Limit.parse(text)  # type: ignore[arg-type]


@given(st.integers(0, 2**45))
def test_the_least_limit_as_written_is_enough_and_hardly_more(nbytes: int) -> None:
    given_back = Limit.parse(least_written(nbytes)).total_bytes
    assert given_back is not None
    assert nbytes <= given_back <= nbytes + max(0, nbytes // 10)
    assert nbytes < 2**40 or given_back <= nbytes + 2**30 // 10 + 1


def test_written() -> None:
    assert [least_written(n) for n in (0, 1023, 1024, 1025, 2**20, 957_455_565)] == [
        "0B", "1023B", "1.0KiB", "1.1KiB", "1.0MiB", "913.2MiB",
    ]  # fmt: skip
    assert [written_bytes(n) for n in (1023, 1024, 957_455_565, 2**41)] == [
        "1023 B", "1.0 KiB", "913.1 MiB", "2048.0 GiB",
    ]  # fmt: skip
    assert str(Limit.parse("14.66%")) == "14.66 % of the plain activations"
    assert str(Limit.parse("30GiB")) == "30.0 GiB"
