"""Presets as YAML, installed as megatron_adacc.configs: models as Megatron's flags, and the device table."""
