"""Codecs: tensors kept for the backward pass, in fewer bytes.

    from megatron_adacc import codecs
    codec = codecs.get("bitmask")
    packed = codec.encode(mask)
    mask = codec.decode(packed)

One interface (`base.Codec`), one file per format. Each format has a reference in plain torch operations, the
same functions compiled for the CPU, and Triton kernels in megatron_adacc.kernels; all give the same bits.
"""

from megatron_adacc.codecs.base import Codec, Packed, State
from megatron_adacc.codecs.bitmask import BitmaskState, NotTwoValuedError
from megatron_adacc.codecs.options import Implementation, Rounding, Scale
from megatron_adacc.codecs.registry import get, names
from megatron_adacc.codecs.statistics import ChannelStatistics, OutlierState

__all__ = [
    "BitmaskState",
    "ChannelStatistics",
    "Codec",
    "Implementation",
    "NotTwoValuedError",
    "OutlierState",
    "Packed",
    "Rounding",
    "Scale",
    "State",
    "get",
    "names",
]
