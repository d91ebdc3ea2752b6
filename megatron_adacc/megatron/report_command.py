"""`adacc report`: a run's report as one page for a browser.

    adacc report run.json [-o run.html]

run.json is what --adacc-report wrote. The page loads nothing and runs no script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_adacc.errors import UserError
from megatron_adacc.megatron.history_page import load_history
from megatron_adacc.megatron.report_page import page
from megatron_adacc.outputs import check_folders, write


def configure(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.description = (
        "Draw a run's report as one HTML page: memory over layers and over time, the plan, the frontier, losses, "
        "gradient errors, plan changes."
    )
    parser.add_argument("run", metavar="RUN", help="a report that --adacc-report wrote")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page (default: RUN with the ending .html)")


def run(args: argparse.Namespace) -> int:
    """Write the page. Raises UserError for a file that is no report."""
    output = args.output or str(Path(args.run).with_suffix(".html"))
    check_folders(output)
    if Path(output).resolve() == Path(args.run).resolve():
        raise UserError(f"{output} is the report itself: name another file with -o.")
    report = load_history(args.run)
    if report is None:
        raise UserError(f"{args.run} is not there or no report: give a file that --adacc-report wrote.")
    try:
        text = page(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{args.run} is a report in which something is missing or of another kind ({error!r}): make it again with "
            "this version."
        ) from error
    write(output, text)
    sys.stdout.write(f"{output}\n")
    return 0
