"""Optimizer state in blocks of adaptive precision, delayed group updates, and a guard for gradients.

    from megatron_adacc.optim import BlockAdamW
    optimizer = BlockAdamW(model.parameters(), lr=3e-4, bits=8)

Off unless used: all of it changes the training. docs/states.md has the formulas and what was measured.
"""

from megatron_adacc.optim.block_adamw import BlockAdamW

__all__ = ["BlockAdamW"]
