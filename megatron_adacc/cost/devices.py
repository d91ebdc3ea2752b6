"""The device table: what a GPU that is not there can do. Figures and their sources are in configs/devices.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from megatron_adacc.errors import UserError

TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True)
class DeviceSpec:
    """One GPU.

    Attributes:
        name: as in the table, such as ``v100-32gb``.
        full_name: the vendor's.
        capability: CUDA compute capability.
        memory_bytes: what CUDA reports as the device's memory.
        peak_flops: floating-point operations a second by dtype of the operands, dense.
        matmul_fraction: of the peak that large matrix products reach.
        bandwidth: peak bytes a second of the device memory.
        bandwidth_fraction: of it that a kernel reaches which reads and writes each byte once.
        link: bytes a second to the other GPUs of the machine, one direction.
        link_fraction: of it that a large collective reaches.
        launch_us: microseconds of an op that does nothing.
        source: where the figures come from.
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    memory_bytes: int
    peak_flops: Mapping[str, float]
    matmul_fraction: float
    bandwidth: float
    bandwidth_fraction: float
    link: float
    link_fraction: float
    launch_us: float
    source: tuple[str, ...]

    def matmul_flops(self, dtype: str) -> float:
        """Operations a second of a large matrix product; where the dtype has no fast path, those of float32."""
        peak = self.peak_flops.get(dtype, self.peak_flops["float32"])
        return peak * self.matmul_fraction

    @property
    def achievable_bandwidth(self) -> float:
        """Bytes a second, read and written."""
        return self.bandwidth * self.bandwidth_fraction

    @property
    def achievable_link(self) -> float:
        """Bytes a second that one GPU sends in a large collective."""
        return self.link * self.link_fraction


def device(name: str) -> DeviceSpec:
    """The device of this name or alias, or of the name that CUDA reports; case, spaces and vendor do not matter.

    Raises:
        UserError: a name that the table does not have.
    """
    table, aliases = _table()
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower())
    wanted = re.sub(r"^(nvidia-|tesla-)+", "", wanted)
    if wanted == "cpu":
        raise UserError(
            "The device 'cpu' has no entry in the device table, because a CPU's prices are measured on the machine "
            f"itself; run with the plan auto there, or choose one of {', '.join(table)}."
        )
    found = aliases.get(wanted)
    if found is None:
        raise UserError(f"There is no device '{name}' in the device table; there are {', '.join(table)}.")
    return table[found]


def device_names() -> tuple[str, ...]:
    """The names in the table."""
    return tuple(_table()[0])


@cache
def _table() -> tuple[Mapping[str, DeviceSpec], Mapping[str, str]]:
    """The table, and from each name and alias to the name."""
    text = resources.files("megatron_adacc.configs").joinpath("devices.yaml").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = yaml.safe_load(text)
    table = {name: _spec(name, entry) for name, entry in entries.items()}
    aliases = {alias: name for name, entry in entries.items() for alias in (name, *entry["aliases"])}
    return MappingProxyType(table), MappingProxyType(aliases)


def _spec(name: str, entry: Mapping[str, Any]) -> DeviceSpec:
    major, minor = entry["capability"]
    return DeviceSpec(
        name=name,
        full_name=entry["full_name"],
        capability=(major, minor),
        memory_bytes=round(entry["memory_gib"] * 2**30),
        peak_flops=MappingProxyType({dtype: tera * TERA for dtype, tera in entry["peak_tflops"].items()}),
        matmul_fraction=entry["matmul_fraction"],
        bandwidth=entry["bandwidth_gb_s"] * GIGA,
        bandwidth_fraction=entry["bandwidth_fraction"],
        link=entry["link_gb_s"] * GIGA,
        link_fraction=entry["link_fraction"],
        launch_us=entry["launch_us"],
        source=tuple(entry["source"]),
    )
