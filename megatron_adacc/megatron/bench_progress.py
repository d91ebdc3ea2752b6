"""How far `adacc bench` is: on a terminal a spinner on stderr, elsewhere a line for whatever is finished."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Told:
    """Told of cases, strategies and rounds. ``cases``: how many there will be."""

    def __init__(self, cases: int) -> None:
        self._cases = cases
        self._case = 0
        self._title = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def case(self, title: str) -> None:
        """The next case begins."""
        self._case += 1
        self._title = title

    def doing(self, words: str, place: str = "") -> None:
        """What is done now; ``place``: such as "strategy 2 of 14"."""
        if self._bar is not None:
            where = f"case {self._case} of {self._cases}" + (f", {place}" if place else "")
            self._bar.update(self._task, description=f"{where}: {self._title}: {words}")

    def done(self, words: str) -> None:
        """What is finished."""
        if self._bar is None:
            sys.stderr.write(f"{self._title}: {words}\n")
            sys.stderr.flush()
