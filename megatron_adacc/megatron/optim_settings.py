"""The section `optim` of the file that --adacc-config names: the optimizer's memory by the recipe's names.

    optim:
      macro_architecture: true              delayed group updates
      group_size: 6                         --adacc-dgr-group-size, where the command line has none
      offload: true                         --adacc-dgr-offload
      offload_dir: /scratch                 --adacc-dgr-offload-dir, where the command line has none
      precision_policy: {text: fp16}        the fewest bits of Adam's moments: fp32, fp16, fp8, fp4, or a list by layer

A policy is a floor: under --adacc-state-plan 8 a parameter of fp16 has 16 bits. `text` is all of a GPT; of other
modalities it has no parameters, and a line says so.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_adacc.errors import UserError

SECTION = "optim"
_BITS = {"fp32": 32, "fp16": 16, "fp8": 8, "fp4": 4}
_NAMES = ("macro_architecture", "group_size", "offload", "offload_dir", "precision_policy")


def section_of(path: str) -> dict[str, Any]:
    """What a file says in the section, empty where it has none. Raises UserError, naming the file, for what is not
    right."""
    from megatron_adacc.adaptive.config import Config

    found = Config.settings_in(path, beside=(SECTION,)).get(SECTION, {})
    try:
        return _checked(found)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _checked(found: Any) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UserError(f"{SECTION} has to be names with values; it is {found!r}.")
    for name in found:
        if name not in _NAMES:
            raise UserError(f"{SECTION} has no setting {name!r}; there are {', '.join(_NAMES)}.")
    for name in ("macro_architecture", "offload"):
        if not isinstance(found.get(name, True), bool):
            raise UserError(f"{name} has to be true or false; it is {found[name]!r}.")
    if not isinstance(found.get("offload_dir", ""), str):
        raise UserError(f"offload_dir has to be the path of a folder; it is {found['offload_dir']!r}.")
    size = found.get("group_size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"group_size has to be a whole number of groups, 1 or more; it is {size!r}.")
    if found.get("macro_architecture") and "group_size" not in found:
        raise UserError("macro_architecture needs group_size, the number of groups.")
    for name in ("group_size", "offload"):
        if found.get(name) and not found.get("macro_architecture"):
            raise UserError(f"{name} is for macro_architecture: true; add that, or leave {name} out.")
    if "offload_dir" in found and not found.get("offload"):
        raise UserError("offload_dir is for offload: true; add that, or leave offload_dir out.")
    policy = found.get("precision_policy", {})
    if not isinstance(policy, Mapping):
        raise UserError(f"precision_policy has to be modalities with formats; it is {policy!r}.")
    for modality, formats in policy.items():
        listed = formats if isinstance(formats, list) else [formats]
        if not listed or any(one not in _BITS for one in listed):
            raise UserError(
                f"precision_policy gives {modality!r} the value {formats!r}; it is one of {', '.join(_BITS)}, or a "
                "list of them with one entry for each layer."
            )
    return dict(found)


def complete(args: Namespace, given: list[str]) -> None:
    """Write the section into Megatron's arguments; the command line comes before it."""
    args.adacc_precision_policy = None
    if args.adacc_config is None:
        return
    section = section_of(args.adacc_config)
    named = any(token.split("=")[0] == "--adacc-dgr-group-size" for token in given)
    if section.get("macro_architecture") and not named:
        args.adacc_dgr_group_size = section["group_size"]
    if section.get("offload"):
        args.adacc_dgr_offload = True
        args.adacc_dgr_offload_dir = args.adacc_dgr_offload_dir or section.get("offload_dir")
    policy = section.get("precision_policy")
    if not policy:
        return
    if args.adacc_state_plan == "full":
        raise UserError(
            f"precision_policy in {args.adacc_config} is for a state plan; the plan full keeps 32 bits everywhere: "
            "give --adacc-state-plan as well, or leave it out."
        )
    text = policy.get("text")
    if isinstance(text, list) and args.pipeline_model_parallel_size > 1:
        raise UserError(
            f"precision_policy in {args.adacc_config} has a list by layer, which pipeline stages number each for "
            "themselves: give one format for all."
        )
    args.adacc_precision_policy = dict(policy)


def floors(policy: Mapping[str, Any] | None, names: Mapping[str, int]) -> dict[int, int]:
    """The fewest bits by id. ``names``: of a GPT's parameters, to the id that is asked for. Raises UserError for a list
    that does not have an entry for a layer; parameters outside the layers then have 32 bits."""
    text = (policy or {}).get("text")
    if text is None:
        return {}
    if not isinstance(text, list):
        return dict.fromkeys(names.values(), _BITS[text])
    from megatron_adacc.optim.policy import PrecisionPolicy

    by_layer = PrecisionPolicy({"*.layers.*": [_BITS[one] for one in text], "*": 32})
    return {key: by_layer.lowest_bits(name) for name, key in names.items()}


def without_parameters(policy: Mapping[str, Any] | None) -> list[str]:
    """Modalities of the policy that a GPT has nothing of."""
    return [name for name in policy or {} if name != "text"]
