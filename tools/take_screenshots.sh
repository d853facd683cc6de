#!/usr/bin/env bash
# Take the pictures of the site and of a run's report: tools/take_screenshots.sh, after `make docs` and `make annotate`.
set -euo pipefail
cd "$(dirname "$0")/.."
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
    echo "Chromium is needed (Debian: apt-get install chromium)" >&2
    exit 1
}
out=docs/images/screens
mkdir -p "$out"
take() {  # take NAME PAGE HEIGHT
    "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --screenshot="$out/$1.png" --window-size="1100,$3" \
        "file://$PWD/$2" 2>/dev/null
    echo "$out/$1.png"
}
take home artifacts/site/index.html 1150
take how-it-works artifacts/site/how/index.html 1150
report=$(find demo/runs -name report.html -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
sed "s#<wbr>##g; s#$PWD/##g" "$report" >artifacts/report.html # paths as from the repository on
take report artifacts/report.html 2100
