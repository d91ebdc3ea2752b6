"""Triton kernels, one file a codec (installed as megatron_adacc.kernels)."""
