#!/usr/bin/env bash
# Record `make annotate` as it looks on a terminal: tools/record_demo.sh, on a quiet machine, after `make clean`.
# Every state of the screen is shown for 0.12 s at most, so that the engine's start takes seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/uv tool run --quiet --from termtosvg==1.1.0 --with 'setuptools<81' termtosvg docs/images/demo.svg \
    --screen-geometry 120x34 --max-frame-duration 120 --loop-delay 8000 --template window_frame --command 'make annotate'
