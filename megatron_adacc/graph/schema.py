"""What an op does beyond its arguments: which it writes, whether it draws random numbers, whether the host
reads its result, whether it is a collective."""

from __future__ import annotations

from typing import Any

import torch

# c10d ops write tensors that their schema declares as read-only. For each: positions of written arguments.
COLLECTIVE_WRITES: dict[str, tuple[int, ...]] = {
    "c10d::allreduce_": (0,),
    "c10d::allreduce_coalesced_": (0,),
    "c10d::broadcast_": (0,),
    "c10d::reduce_": (0,),
    "c10d::allgather_": (0,),
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_coalesced_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::reduce_scatter_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::reduce_scatter_tensor_coalesced_": (0,),
    "c10d::alltoall_": (0,),
    "c10d::alltoall_base_": (0,),
    "c10d::gather_": (0,),
    "c10d::scatter_": (0,),
    "c10d::recv_": (0,),
    "c10d::recv_any_source_": (0,),
}
# Of these the earlier contents of the written tensor are not read.
COLLECTIVE_OVERWRITES = frozenset(
    {
        "c10d::allgather_",
        "c10d::_allgather_base_",
        "c10d::allgather_coalesced_",
        "c10d::allgather_into_tensor_coalesced_",
        "c10d::reduce_scatter_",
        "c10d::_reduce_scatter_base_",
        "c10d::reduce_scatter_tensor_coalesced_",
        "c10d::alltoall_",
        "c10d::alltoall_base_",
    }
)
# Point-to-point traffic pairs with another rank's call; running it again would wait for ever.
NOT_REPEATABLE = frozenset({"c10d::send", "c10d::recv_", "c10d::recv_any_source_", "c10d::barrier"})

FUNCTIONAL_COLLECTIVES = "_c10d_functional"

# Ops whose every written byte is new: an in-place call does not depend on what was there.
OVERWRITING = frozenset({"aten::copy_", "aten::fill_", "aten::zero_"})

HOST_READS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::equal",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::_unique2",
        "aten::masked_select",
    }
)

# Their schema does not say that running statistics, arguments 3 and 4, are written in training.
UNDECLARED_WRITES: dict[str, tuple[int, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}

# beta * input + alpha * product: with beta 0 the input, their first argument, is not read. Megatron's unfused
# attention gives its scores that way a place in memory that all layers use in turn.
SCALED_SUMS = frozenset({"aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::addr"})

EMPTY_OPS = frozenset(
    {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
)


def op_name(func: Any) -> str:
    """``aten::mm`` for ``torch.ops.aten.mm.default``."""
    return str(func._schema.name)


def overload_name(func: Any) -> str:
    """``aten.mm.default``: the name under which :func:`find_op` finds the op again."""
    namespace, name = op_name(func).split("::", 1)
    return f"{namespace}.{name}.{func._overloadname}"


def find_op(target: str) -> Any:
    """The op of a name as :func:`overload_name` makes it. Raises AttributeError where it does not exist."""
    namespace, name, overload = target.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def out_variant(func: Any) -> Any | None:
    """The overload that computes the same from the same arguments and writes it to a keyword argument ``out``;
    None where there is none."""
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments]
    packet = func.overloadpacket
    for overload in packet.overloads():
        found = getattr(packet, overload)
        *others, last = found._schema.arguments or [None]
        if (
            last is not None
            and last.name == "out"
            and last.is_out
            and [(a.name, str(a.type)) for a in others] == arguments
        ):
            return found
    return None


def is_collective(func: Any) -> bool:
    return op_name(func).split("::", 1)[0] in ("c10d", FUNCTIONAL_COLLECTIVES)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments (tensors or lists of tensors) that the call writes, as passed."""
    name = op_name(func)
    if name in COLLECTIVE_WRITES:
        return [args[i] for i in COLLECTIVE_WRITES[name] if i < len(args)]
    if name == f"{FUNCTIONAL_COLLECTIVES}::wait_tensor":
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args) and not argument.kwarg_only:
            found.append(args[position])
        elif argument.name in kwargs:
            found.append(kwargs[argument.name])
    for position in UNDECLARED_WRITES.get(name, ()):
        if position < len(args) and args[position] is not None:
            found.append(args[position])
    return found


def overwrites_all(func: Any) -> bool:
    """Whether written arguments are written whole, whatever they held: out= arguments, copy_, all-gather."""
    name = op_name(func)
    if name in COLLECTIVE_OVERWRITES or name in OVERWRITING:
        return True
    return any(a.kwarg_only and a.alias_info is not None and a.is_out for a in func._schema.arguments)


def unread_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The position of a tensor argument whose contents the call does not read, None where it reads all."""
    if op_name(func) not in SCALED_SUMS or kwargs.get("beta", 1) != 0 or not args:
        return None
    return 0 if isinstance(args[0], torch.Tensor) and args[0].layout == torch.strided else None


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call takes numbers from a generator. An attention kernel with dropout 0 does not, though
    its tag says that it may."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = dict(kwargs)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        values[argument.name] = value
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    for name in ("dropout_p", "p"):
        if name in values or name in defaults:
            return bool(values.get(name, defaults.get(name)) != 0.0)
    return True
