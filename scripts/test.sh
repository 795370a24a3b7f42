#!/bin/sh
# Everything from a fresh machine to tested: environment, format, lint, types, tests on both lane widths.
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install --quiet 'torch==2.13.0'
.venv/bin/pip install --quiet --editable '.[dev]'
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/pyright --warnings --pythonpath .venv/bin/python
# Two processes at a time, each with one thread of its own: more would only wait for each other.
export OMP_NUM_THREADS=1
.venv/bin/python -m pytest -n 2 --dist loadscope "$@"
other=$(.venv/bin/python -c 'from quant.lanes import WIDTH; print(24 - WIDTH)')
CONVERT_MTP_LANES=$other .venv/bin/python -m pytest -n 2 tests/quant/test_bytes.py tests/quant/test_lanes.py
