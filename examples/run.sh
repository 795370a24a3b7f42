#!/bin/sh
# Everything from a fresh machine to a decoded model: environment, conversion, llama.cpp plain and with MTP.
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || python3 -m venv .venv
.venv/bin/pip install --quiet --editable '.[llamacpp]'
exec .venv/bin/python examples/demo.py
