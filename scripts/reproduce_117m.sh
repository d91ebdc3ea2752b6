#!/usr/bin/env bash
# GPT-117M of Adacc (arXiv 2508.00806) on 8 x V100; --help says more. Sets everything up first.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$root/scripts/setup.sh" >&2
exec "$root/.venv/bin/python" "$root/scripts/reproduce.py" 117m "$@"
