"""The two functions of megatron_adacc/outputs.py."""

from megatron_adacc.outputs import check_folders, write

__all__ = ["check_folders", "write"]
