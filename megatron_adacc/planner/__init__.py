"""Plans. Pure Python: neither torch nor Megatron is imported here."""

from megatron_adacc.planner.plan import Action, Compress, Keep, LayerPlan, Plan, Recompute

__all__ = ["Action", "Compress", "Keep", "LayerPlan", "Plan", "Recompute"]
