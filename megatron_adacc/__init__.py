"""Adaptive activation memory for Megatron-LM.

Importing this package imports neither CUDA, Triton, OR-Tools nor Megatron; the sub-packages that need
one of them import it when they are used.
"""

__version__ = "0.1.0"
