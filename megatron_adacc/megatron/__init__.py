"""The Megatron side: flags, baselines, accounting hooks, data; the only package that imports megatron."""
