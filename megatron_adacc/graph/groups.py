"""Process groups by name: a trace must not keep a group alive, whose threads end with its last owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class GroupName:
    """Stands for a process group among a trace's live objects."""

    name: str

    def group(self) -> dist.ProcessGroup:
        """The group, as it is registered now. Raises LookupError or RuntimeError where it is no more."""
        return dist.distributed_c10d._resolve_process_group(self.name)  # type: ignore[arg-type]

    def boxed(self) -> Any:
        """The group as c10d's ops take it."""
        return self.group().boxed()


def by_name(value: Any) -> Any:
    """A :class:`GroupName` for a process group as c10d's ops get it; anything else as it is."""
    if not isinstance(value, torch.ScriptObject) or "ProcessGroup" not in str(value._type()):
        return value
    group = dist.ProcessGroup.unbox(value)
    return value if group is None else GroupName(group.group_name)


def named_group(name: str) -> dist.ProcessGroup | None:
    """The group of this name, None where there is none."""
    try:
        return GroupName(name).group()
    except (LookupError, RuntimeError, ValueError):
        return None
