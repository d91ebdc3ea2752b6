"""Our entry in a Megatron checkpoint: the state of adaptation of each pipeline stage and tensor-parallel rank.

    {"format": 1, "tensor_parallel": t, "pipeline_parallel": p, "steps": n, "asked": {...},
     "ranks": {"stage,rank": state}}

Data-parallel ranks have the same state, so their number may change. Formats in which each rank writes a file of its own
have that rank's state in it; the others have all of them. Only builtins are written.
"""

import logging
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_adacc.adaptive.controller import AdaptiveHandle
from megatron_adacc.errors import UserError
from megatron_adacc.megatron.state_plan import Exchange

logger = logging.getLogger(__name__)

FORMAT = 1


class SavedState:
    """What a run's checkpoints hold of ours. ``handle``: set when layers are attached, None while they are not.
    ``states``: the state plan, None without one."""

    def __init__(self, states: Exchange | None = None) -> None:
        self.states = states
        self.handle: AdaptiveHandle | None = None
        self.attached = False
        self._loaded: dict[str, Any] | None = None
        self._any_loaded = False

    def entry(self, args: Namespace) -> dict[str, Any] | None:
        """For a checkpoint that is written now; None while it is only read."""
        if not self.attached:
            return None
        own = {} if self.handle is None else {_key(): self.handle.state_dict()}
        ranks = own
        if args.ckpt_format != "torch":
            everyone: list[dict[str, Any]] = [{} for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather_object(everyone, own if _writes() else {})
            ranks = {key: state for one in everyone for key, state in one.items()}
        steps = max((state["steps"] for state in ranks.values()), default=0)
        tensor, pipeline = _layout()
        return {
            "format": FORMAT, "tensor_parallel": tensor, "pipeline_parallel": pipeline, "steps": steps, "ranks": ranks,
            "asked": {} if self.handle is None else _asked(self.handle),
        }  # fmt: skip

    def loaded(self, entry: Any) -> None:
        """What a checkpoint had, when it was read."""
        self._any_loaded = True
        self._loaded = entry

    def resume(self, args: Namespace, say: Callable[[str], None]) -> None:
        """Put what was loaded into the handle, and say in a line what becomes of it."""
        if not self._any_loaded or self.handle is None:
            return
        entry, self._loaded = self._loaded, None
        if args.finetune:
            say("a new training begins (--finetune): the plan is made anew")
            return
        if entry is None:
            say("the checkpoint was written without a plan: it is made anew")
            return
        try:
            if entry["format"] != FORMAT:
                raise UserError(f"its format is {entry['format']}, this version reads {FORMAT}")
            layout = entry["tensor_parallel"], entry["pipeline_parallel"]
            if layout != _layout():
                words = " and ".join(f"{n} {kind}" for n, kind in zip(layout, ("tensor", "pipeline"), strict=True))
                raise UserError(f"it was written by a job with {words} parallel ranks")
            asked = _asked(self.handle)
            if entry["asked"] != asked:
                was = entry["asked"].get("plan")
                raise UserError(f"it was written under the plan {was!r} with {_difference(entry['asked'], asked)}")
            state = entry["ranks"][_key()]
            self.handle.load_state_dict(state)
        except (KeyError, TypeError, UserError) as error:
            say(f"the plan is made anew, and not taken from the checkpoint ({str(error).rstrip('.')})")
            return
        say(
            f"adaptation goes on after {self.handle.steps} steps with the plan of the checkpoint; next check after "
            f"step {self.handle.schedule.next_check}"
        )


def _asked(handle: AdaptiveHandle) -> dict[str, Any]:
    """What a plan was asked for: another one is another plan."""
    config = handle.config
    return {
        "plan": config.plan,
        "limit": config.limit,
        "error_budget": config.error_budget,
        "compression_levels": dict(config.compression_levels),
    }


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    name = next(name for name in new if old.get(name) != new[name])
    return f"{name} {old.get(name)!r} instead of {new[name]!r}"


def _layout() -> tuple[int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


def _key() -> str:
    from megatron.core import parallel_state

    return f"{parallel_state.get_pipeline_model_parallel_rank()},{parallel_state.get_tensor_model_parallel_rank()}"


def _writes() -> bool:
    from megatron.core import parallel_state

    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0)
