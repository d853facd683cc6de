#!/usr/bin/env bash
# Record a job of some minutes, and take a picture of its report: tools/take_screenshots.sh.
# The job reads the demo table 24 times over: in 2,223 rows the engine's start is most of what there is to see.
set -euo pipefail
cd "$(dirname "$0")/.."
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || {
    echo "Chromium is needed (Debian: apt-get install chromium)" >&2
    exit 1
}
out=docs/images/screens work=artifacts/recording
rm -rf "$work"
mkdir -p "$out" "$work"
.venv/bin/python - "$work/packages.parquet" <<'PYTHON'
import sys
import pyarrow as pa, pyarrow.compute as pc, pyarrow.parquet as pq
table = pq.read_table("examples/data/debian_packages.parquet")
at = table.column_names.index("package")
copies = (table.set_column(at, "package", pc.binary_join_element_wise(table["package"], f"+{copy}", "")) for copy in range(24))
pq.write_table(pa.concat_tables(copies), sys.argv[1])
PYTHON
cat >"$work/annotate" <<'SHELL'
#!/usr/bin/env bash
spark-submit --master 'local[2]' jobs/annotate.py --input artifacts/recording/packages.parquet \
    --output artifacts/recording/annotated --id-columns package \
    --template 'Package: {package}\nSummary: {summary}\nDescription: {description}' \
    --model examples/model --engine conf/engines/demo.yaml --max-tokens 24 \
    --response-format examples/section.schema.json --gold-column section --logprobs 2>/dev/null
SHELL
chmod +x "$work/annotate"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python tools/record_demo.py docs/images/demo.svg \
    "spark-submit jobs/annotate.py --input packages.parquet --template 'Package: {package}…' --model examples/model …" "$work/annotate"
report=$(find "$work/runs" -name report.html -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
sed "s#<wbr>##g; s#$PWD/##g" "$report" >artifacts/report.html # paths as from the repository on
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --screenshot="$out/report.png" --window-size=1100,965 \
    "file://$PWD/artifacts/report.html" 2>/dev/null
echo "$out/report.png"
