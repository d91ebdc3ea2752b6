"""Changes to upstream code, one file per upstream file (installed as megatron_adacc.patches)."""
