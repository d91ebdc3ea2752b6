"""Measured prices on disk: one JSON file for each device and set of versions.

    $ADACC_CACHE_DIR, else $XDG_CACHE_HOME/megatron-adacc, else ~/.cache/megatron-adacc; ADACC_CACHE_DIR="" or
    "off" for none

    prices-<16 hex digits of the header's hash>.json
        {"header": {"device": ..., "torch": ..., "triton": ..., "threads": ..., "megatron_adacc": ...},
         "prices": {"op aten.mm.default ...": [12.5], "codec name=group_int4 ...": [30.1, 20.2]}}

A cache is a convenience: whatever is wrong with it costs a measurement and a line in the log, never the training.
The file is written whole or not at all, by one process at a time, merged with what others wrote meanwhile. The
oldest prices go when there are too many.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

import megatron_adacc
from megatron_adacc.atomic import sole_writer, write_text

logger = logging.getLogger(__name__)

VARIABLE = "ADACC_CACHE_DIR"
MOST_PRICES = 5_000
MOST_BYTES = 16 * 2**20  # a larger file was not written here, and is not read
HEADER_BYTES = 4096


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for caches, None where there is to be none."""
    chosen = environment.get(VARIABLE)
    if chosen is not None:
        return None if chosen.strip().lower() in ("", "off") else Path(chosen).expanduser()
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, says the XDG base directory specification
        return Path(base) / "megatron-adacc"
    try:
        return Path.home() / ".cache" / "megatron-adacc"
    except RuntimeError:  # no home
        return None


def header_for(device: torch.device) -> dict[str, str | int]:
    """What all prices of one file have in common."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()} {_cpu_model()}".strip()
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "threads": torch.get_num_threads(),
        "megatron_adacc": megatron_adacc.__version__,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class PriceCache:
    """Prices of one header, read when first asked for. ``folder`` None: nothing is read or written."""

    def __init__(self, folder: Path | None, header: Mapping[str, str | int]) -> None:
        self._header = dict(header)
        digest = hashlib.sha256(json.dumps(self._header, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"prices-{digest}.json"
        self._prices: dict[str, list[float]] | None = None
        self._said = False

    @staticmethod
    def of(device: torch.device) -> PriceCache:
        """The cache of this device, in the user's folder."""
        return PriceCache(cache_folder(), header_for(device))

    def get(self, key: str, count: int) -> list[float] | None:
        """The ``count`` prices of a key in microseconds, None where they are not known."""
        if self._prices is None:
            self._prices = self._read()
        found = self._prices.get(key)
        return found if found is not None and len(found) == count else None

    def update(self, prices: Mapping[str, list[float]]) -> None:
        """Remember prices, here and on disk. A folder that cannot be written is a line in the log."""
        prices = {key: [float(us) for us in value] for key, value in prices.items()}
        self._prices = _bounded((self._prices or {}) | prices)
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with sole_writer(self.path):
                _remove_remains(self.path)
                # What others measured meanwhile stays; ours is newer, and stands last.
                merged = {k: v for k, v in self._read().items() if k not in prices} | prices
                self._prices = _bounded(merged)
                content = {"header": self._header, "prices": self._prices}
                write_text(self.path, json.dumps(content))
        except OSError as error:
            self._say("Prices are not cached: %s cannot be written (%s).", error)

    def _read(self) -> dict[str, list[float]]:
        """The file's prices; none where it is missing or broken."""
        if self.path is None:
            return {}
        try:
            if self.path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return _checked(content, self._header)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._say("The cached prices in %s are not used (%s); they are measured again.", error)
            return {}

    def _say(self, sentence: str, error: Exception) -> None:
        """Log what is wrong, the first time that something is."""
        if not self._said:
            logger.warning(sentence, self.path, error)
            self._said = True


def _checked(content: object, header: Mapping[str, str | int]) -> dict[str, list[float]]:
    """The prices of a file's content. Raises ValueError for one that PriceCache did not write."""
    if not isinstance(content, dict) or set(content) != {"header", "prices"} or content["header"] != header:
        raise ValueError("it is not a file of prices for this device")
    prices = content["prices"]
    if not isinstance(prices, dict) or not all(_is_price(value) for value in prices.values()):
        raise ValueError("it holds something else than prices")
    return {key: [float(us) for us in value] for key, value in prices.items()}


def _is_price(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(us, float) and math.isfinite(us) and us >= 0 for us in value)


def _bounded(prices: dict[str, list[float]]) -> dict[str, list[float]]:
    """The newest prices, which stand last: as many as the file may hold."""
    sizes = itertools.accumulate(len(json.dumps(item)) + 4 for item in reversed(prices.items()))
    fitting = sum(size <= MOST_BYTES - HEADER_BYTES for size in itertools.islice(sizes, MOST_PRICES))
    return dict(list(prices.items())[len(prices) - fitting :])


def _remove_remains(path: Path) -> None:
    """Half-written siblings of writers that died. To be called by the sole writer, as nobody else has any."""
    for remains in path.parent.glob(f".{path.name}.*.tmp"):
        remains.unlink(missing_ok=True)
