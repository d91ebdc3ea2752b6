#!/usr/bin/env bash
# Sets everything up, then trains a small GPT on real text with each plan and prints the comparison.
#   bash scripts/demo.sh [--iterations N] [--plans PLAN ...] [--data DIR] [--help]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for argument in "$@"; do
    if [[ "$argument" == "-h" || "$argument" == "--help" ]]; then
        cat <<'HELP'
usage: bash scripts/demo.sh [--iterations N] [--plans PLAN ...] [--data DIR]

Sets everything up (scripts/setup.sh), makes a data set of the Python standard library's source, trains a
GPT of about 10 M parameters on it with each of the plans off, full, auto (in 1.05 x the memory that full needs),
selective and recompute from the same seed, and prints a table. Takes about six minutes on two cores after set-up.
Results: runs/demo/ (summary.json, a report and a log for each plan); those of an earlier call are overwritten.

  --iterations N   training iterations for each plan (default 30)
  --plans PLAN ... of these plans only (off and full always run)
  --data DIR       train on what `adacc prepare-data` wrote there instead
HELP
        exit 0
    fi
done
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/python" "$root/scripts/demo.py" "$@"
