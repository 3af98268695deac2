#!/usr/bin/env bash
# Install the wheels that were carried along (`make device` says how), and run the steps. Arguments: those of `tests/device`.
set -e
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
# The sources are imported and not the wheel, whose compiled library they need.
mkdir -p polyaccel/lib && cp /tmp/site/polyaccel/lib/* polyaccel/lib/ && rm -rf /tmp/site/polyaccel
export PYTHONPATH=$PWD:/tmp/site PATH=/tmp/site/bin:$PATH
exec python3 tests/device "$@"
