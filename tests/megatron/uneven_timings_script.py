"""pretrain_gpt.py on ranks that find other prices, and write the plan that each then holds to a file of its own."""

import hashlib
import os
import runpy
import sys
from pathlib import Path

from megatron_adacc.cost import measured
from megatron_adacc.runtime.auto import Auto

ROOT = Path(__file__).resolve().parents[2]

RANK = int(os.environ.get("RANK", "0"))
time_layer = measured.time_layer


def scaled(*args, **kwargs):
    """On the second rank the price of every op is drawn anew: what is cheap elsewhere may be dear here."""
    found, price = time_layer(*args, **kwargs)
    factors = {op: 1 + 999 * RANK * int(hashlib.sha1(str(op).encode()).hexdigest(), 16) % 1000 for op in found}
    return {op: us * factors[op] for op, us in found.items()}, price


solve = Auto._solve


def noted(self):
    solve(self)
    Path(os.environ["PLANS"], f"{RANK}.json").write_text(self.stage.plan.to_json())
    prices = [op.us for fact in self.stage.facts for op in fact.layer_class.ops]
    Path(os.environ["PLANS"], f"{RANK}.prices").write_text(repr(prices))


measured.time_layer = scaled
Auto._solve = noted
sys.argv[0] = str(ROOT / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
