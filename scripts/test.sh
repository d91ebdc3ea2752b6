#!/usr/bin/env bash
# Set up if needed, then check style and types and run the test suite; stops at the first that fails.
set -euo pipefail

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    cat <<'TEXT'
usage: scripts/test.sh [pytest arguments]

Runs scripts/setup.sh, ruff check, ruff format --check, mypy, and pytest, a worker a core, with the given arguments:
  scripts/test.sh                       everything
  scripts/test.sh tests/test_cli.py -x  one file, stop at the first failure
  scripts/test.sh -m "not distributed"  without the tests that start several processes
  scripts/test.sh -m slow               further layouts, formats and precisions, which are left out otherwise
The last line is pytest's own summary; the exit code is that of the first step that failed.
TEXT
    exit 0
fi

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/setup.sh"
cd "$root"
python=$root/.venv/bin/python
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
# Half of the tests wait for processes of their own; the other worker goes on meanwhile. A file stays with one worker, and
# files are handed out in the order of tests/conftest.py.
exec "$python" -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
