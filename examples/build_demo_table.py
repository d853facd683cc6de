"""Make the demo table, its training split and the answer schema from Debian's package descriptions.

Reads the package lists that apt keeps for Debian's own `main` component (the release and its `-updates` and
`-security` suites), through apt's own tools. Keeps the newest version of every package, joins it with its English
long description, and splits by source package, so that no sibling of a test row is ever seen in training. Prints
how many rows each step dropped.

It downloads nothing (`apt-get -o Acquire::Languages=en update` does), knows nothing of the model, and looks for no
near-duplicates: two source packages may describe themselves in almost the same words and stand on both sides.

Run on a Debian machine: python examples/build_demo_table.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

EXAMPLES = Path(__file__).resolve().parent
APT_HELPER = "/usr/lib/apt/apt-helper"
SUITE_SUFFIXES = ("", "-updates", "-security")
COLUMNS = ("package", "source", "version", "summary", "description", "section")
SPLIT_SALT = "debian-packages-57"

Stanza = dict[str, str]
Row = dict[str, str]  # one value for each of COLUMNS


def list_index_files(codename: str, created_by: str) -> list[str]:
    """Paths of apt's files of one kind ("Packages", "Translations") for Debian's own `main`."""
    # A third-party repository may use Debian's codename, too: the origin tells it apart.
    wanted = ["Origin: Debian", "Component: main", f"Created-By: {created_by}"]
    command = [
        "apt-get",
        "-o",
        "Acquire::Languages=en",
        "indextargets",
        "--format",
        "$(CODENAME)\t$(FILENAME)",
    ]
    listing = subprocess.run([*command, *wanted], check=True, capture_output=True, text=True).stdout
    suites = [codename + suffix for suffix in SUITE_SUFFIXES]
    return [path for suite, path in (line.split("\t") for line in listing.splitlines()) if suite in suites]


def read_stanzas(path: str) -> Iterator[Stanza]:
    """Yield the paragraphs of one apt file as {field: value}; continuation lines keep newline and blank."""
    text = subprocess.run([APT_HELPER, "cat-file", path], check=True, capture_output=True, text=True).stdout
    for paragraph in filter(str.strip, text.split("\n\n")):
        fields = (field.partition(":") for field in re.split(r"\n(?! )", paragraph.strip("\n")))
        yield {name: value.strip() for name, _, value in fields}


def version_key(version: str) -> tuple[int, list[tuple[list[int], int]], list[tuple[list[int], int]]]:
    """Sort key of a Debian version: epoch, upstream version, revision, as deb-version(7) orders them."""
    epoch, colon, rest = version.partition(":")
    upstream, _, revision = (rest if colon else version).rpartition("-")
    if not upstream:
        upstream, revision = revision, "0"
    return (int(epoch) if colon else 0), version_part_key(upstream), version_part_key(revision)


def version_part_key(part: str) -> list[tuple[list[int], int]]:
    """Alternating non-digits and numbers; "~" sorts before the end of the part, letters before other signs."""

    def rank(sign: str) -> int:
        if sign == "~":
            return -1
        return ord(sign) if sign.isalpha() else ord(sign) + 256

    return [([*map(rank, text), 0], int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", part)]


def clean_description(long_description: str, max_characters: int) -> str:
    """One line of text: " ." paragraph marks go, runs of blanks become one, the end is cut at a word boundary."""
    lines = (line.strip() for line in long_description.splitlines())
    text = " ".join(" ".join(line for line in lines if line != ".").split())
    if len(text) <= max_characters:
        return text
    return text[: max_characters + 1].rpartition(" ")[0]


def collect_rows(codename: str, max_characters: int, dropped: Counter[str]) -> list[Row]:
    """Return the newest version of every package with its English description, sorted; count what is dropped."""
    long_descriptions: dict[tuple[str, str], str] = {}
    for path in list_index_files(codename, "Translations"):
        for stanza in read_stanzas(path):
            _, _, body = stanza.get("Description-en", "").partition("\n")
            long_descriptions[stanza["Package"], stanza["Description-md5"]] = body

    newest: dict[str, Stanza] = {}
    for path in list_index_files(codename, "Packages"):
        for stanza in read_stanzas(path):
            dropped["read from the lists"] += 1
            held = newest.setdefault(stanza["Package"], stanza)
            if held is not stanza:
                dropped["an older or repeated version of the same package"] += 1
                newest[stanza["Package"]] = max(held, stanza, key=lambda each: version_key(each["Version"]))

    rows: list[Row] = []
    for package, stanza in sorted(newest.items()):
        body = long_descriptions.get((package, stanza.get("Description-md5", "")), "")
        description = clean_description(body, max_characters)
        if package.endswith("-dbgsym"):
            dropped["a -dbgsym package"] += 1
        elif not stanza.get("Section"):
            dropped["no section"] += 1
        elif not description:
            dropped["no English long description"] += 1
        else:
            source = stanza.get("Source", package).partition(" ")[0]
            summary = stanza["Description"].partition("\n")[0]
            section = stanza["Section"].rpartition("/")[2]
            values = (package, source, stanza["Version"], summary, description, section)
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def is_test_source(source: str, test_fraction: float) -> bool:
    """Whether a source package is held out: a pure function of its name, the same for any list it stands in."""
    digest = hashlib.sha256(f"{SPLIT_SALT}/{source}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < test_fraction * 2**64


def write_table(rows: list[Row], path: Path) -> None:
    """Write rows as one zstd Parquet file of plain strings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([pa.field(name, pa.string(), nullable=False) for name in COLUMNS])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd", compression_level=19)
    print(
        f"{path.name}: {len(rows):,} rows, {len({row['section'] for row in rows})} sections, "
        f"{path.stat().st_size:,} bytes"
    )


def write_schema(sections: list[str], path: Path) -> None:
    """Write the JSON schema of an answer: an object with one section's name."""
    schema = {
        "type": "object",
        "properties": {"section": {"type": "string", "enum": sections}},
        "required": ["section"],
        "additionalProperties": False,
    }
    path.write_text(json.dumps(schema, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Build both splits and the schema, and print what was dropped and how the sections fall."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--codename", default="bookworm", help="Debian release to read (default: %(default)s)"
    )
    parser.add_argument(
        "--max-characters", type=int, default=500, help="description cut (default: %(default)s)"
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.038, help="share of sources held out (default: %(default)s)"
    )
    parser.add_argument("--test-table", type=Path, default=EXAMPLES / "data" / "debian_packages.parquet")
    parser.add_argument("--train-table", type=Path, default=EXAMPLES / "build" / "train.parquet")
    parser.add_argument("--schema", type=Path, default=EXAMPLES / "section.schema.json")
    arguments = parser.parse_args()

    counted: Counter[str] = Counter()
    rows = collect_rows(arguments.codename, arguments.max_characters, counted)
    if not rows:
        parser.error(
            f"apt holds no lists of {arguments.codename} main: run apt-get update with English descriptions"
        )
    for step, count in counted.items():
        print(f"{count:7,}  {step}")
    print(f"{len(rows):7,}  rows kept, of {len({row['source'] for row in rows}):,} source packages")

    test = [row for row in rows if is_test_source(row["source"], arguments.test_fraction)]
    train = [row for row in rows if not is_test_source(row["source"], arguments.test_fraction)]
    write_table(test, arguments.test_table)
    write_table(train, arguments.train_table)
    write_schema(sorted({row["section"] for row in rows}), arguments.schema)

    in_test, in_train = (Counter(row["section"] for row in part) for part in (test, train))
    for section in sorted(in_test | in_train):
        print(f"{section:16} {in_train[section]:6,} train {in_test[section]:5,} test")


if __name__ == "__main__":
    main()
