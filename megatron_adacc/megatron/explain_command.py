"""`adacc explain`: why each tensor of a plan got its action, and what the next best would have cost.

    adacc explain plan.json --html why.html

The reasons are in the plan file, where `adacc plan -o` put them; neither device nor model is needed. Microseconds are
those of one micro-batch, over all layers of a group.

    adacc explain report.json --html history.html

A report of --adacc-report instead of a plan file: how the plan of that run changed, and why.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.history_page import history_page, history_text, load_history
from megatron_adacc.outputs import check_folders, write
from megatron_adacc.planner import Plan
from megatron_adacc.planner.reason import Reason, table, written_places


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Why each tensor of a plan got its action, and what the next best would have cost; or, from a run's report, "
        "how its plan changed."
    )
    parser.add_argument(
        "plan",
        metavar="FILE",
        help="a plan file of adacc plan -o (one of adacc trace -o does not say why), or a report of --adacc-report",
    )
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")


def run(args: argparse.Namespace) -> int:
    """Print, write. Raises UserError for a file that is no plan, or one without reasons."""
    check_folders(args.html)
    report = load_history(args.plan)
    if report is not None:
        sys.stdout.write(f"{history_text(report)}\n")
        if args.html:
            write(args.html, history_page(report))
        return 0
    plan = Plan.load(args.plan)
    if not plan.reasons:
        raise UserError(
            f"{args.plan} does not say why its actions were chosen: only plans of adacc plan -o do; make it again with "
            "that."
        )
    sys.stdout.write(f"{heading(plan)}\n\n{table(plan.reasons)}\n")
    if args.html:
        write(args.html, page(plan))
    return 0


def heading(plan: Plan) -> str:
    """What the plan is for, in two lines."""
    notes = ", ".join(f"{name} {value}" for name, value in plan.notes)
    kind = "lossless" if plan.lossless else "lossy"
    return (
        f"Plan {plan.name} ({kind}), predicted for {notes}.\n"
        "For each tensor its action is forbidden and all other actions of its group of layers are chosen anew in the "
        "same room, so that less may be held; microseconds are those of a micro-batch over all layers of the group:"
    )


def page(plan: Plan) -> str:
    """One HTML page that loads nothing: a table for each group of layers with equal plans."""
    parts = []
    for stage, places in dict.fromkeys((reason.stage, reason.layers) for reason in plan.reasons):
        group = [reason for reason in plan.reasons if (reason.stage, reason.layers) == (stage, places)]
        title = ("" if stage is None else f"Stage {stage}, ") + written_places(places)
        parts.append(f"<h2>{html.escape(title)}</h2>\n{_table(group)}")
    first, second = heading(plan).split("\n")
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Plan {html.escape(plan.name)}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.25em 0.9em; text-align: left; border-bottom: 1px solid #ddd; }}
td.n, th.n {{ text-align: right; }}
td.bar {{ width: 12em; }}
td.bar div {{ background: #1f5fbf; height: 0.8em; }}
</style>
</head>
<body>
<h1>Plan {html.escape(plan.name)}: why</h1>
<p>{html.escape(first)}</p>
<p>{html.escape(second.rstrip(":"))}.</p>
{body}
</body>
</html>
"""


def _table(group: Sequence[Reason]) -> str:
    largest = max((reason.more_us for reason in group), default=0.0) or 1.0
    lines = []
    for reason in sorted(group, key=lambda r: (r.second is not None, -r.more_us, r.site)):
        if reason.second is None:
            rest = f'<td colspan="4">{html.escape(reason.sentence.partition(": ")[2])}</td>'
        else:
            width = max(0.0, min(100.0, 100 * reason.more_us / largest))
            at_most = "" if reason.proven else "at most "
            rest = (
                f'<td>{html.escape(reason.second)}</td><td class="n">{at_most}{reason.more_us:,.1f}</td>'
                f'<td class="bar"><div style="width: {width:.1f}%"></div></td><td class="n">{reason.more_bytes:,}</td>'
            )
        lines.append(f"<tr><td>{html.escape(reason.site)}</td><td>{html.escape(reason.action)}</td>{rest}</tr>")
    head = (
        '<tr><th>site</th><th>action</th><th>next best</th><th class="n">us more</th><th></th>'
        '<th class="n">bytes more</th></tr>'
    )
    rows = "\n".join(lines)
    return f"<table>\n{head}\n{rows}\n</table>"
