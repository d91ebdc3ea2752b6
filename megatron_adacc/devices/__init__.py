"""Running Megatron where there is no CUDA."""
