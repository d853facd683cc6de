"""Find and remove what reports, summaries, logs and MLflow's artifacts show of certain rows.

These are texts that were written for people, so rows are found by what identifies them: ids next to their columns'
names, and values that only these rows have. A page that shows one is replaced whole, a line of a log too; of a JSON
file only the texts are. The rows' own tables are not known here.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.report.summary import SUMMARY_FILE
from pipemax_spark.report.tracking import store_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

FORGOTTEN = "(forgotten)"
_PAGE = (
    "<!doctype html><meta charset='utf-8'><p>This page showed a row that was forgotten. The run's figures are in "
    f"{SUMMARY_FILE}.</p>"
)
_KINDS = {".html", ".svg", ".json", ".log", ".txt", ".err", ".out"}
_SHORTEST, _LONGEST = 4, 40
"""Characters of a value that are looked for: shorter ones say nothing of a row, and pages cut long ones."""


class Traces:
    """What would show that a text speaks of the rows."""

    def __init__(self, ids: Sequence[Mapping[str, str]], values: Sequence[str]) -> None:
        """``ids`` are each row's values by column, ``values`` those that only these rows have."""
        words = {_plain(value)[:_LONGEST].strip() for value in values}
        self._words = sorted(word for word in words if len(word) >= _SHORTEST)
        named: dict[str, set[str]] = {}
        for row in ids:
            for name, value in row.items():
                named.setdefault(name, set()).add(_plain(value))
        self._ids = named

    def are_in(self, text: str) -> bool:
        """Tell whether the text, of a page without its tags, speaks of one of the rows."""
        plain = _plain(text)
        if any(word in plain for word in self._words):
            return True
        return any(
            _begins(plain, match.end(), values)
            for name, values in self._ids.items()
            for match in re.finditer(rf"\b{re.escape(name)}[\s=:'\"]+", plain)
        )

    def without(self, name: str, text: str) -> str | None:
        """Return the text of a file of this name without the rows; None if it does not speak of them."""
        match Path(name).suffix:
            case ".html" | ".svg":
                return _PAGE if self.are_in(_text_of_page(text)) else None
            case ".json":
                return self._without_in_json(text)
        lines = text.splitlines(keepends=True)
        kept = [line if not self.are_in(line) else f"{FORGOTTEN}\n" for line in lines]
        return None if kept == lines else "".join(kept)

    def _without_in_json(self, text: str) -> str | None:
        try:
            value = json.loads(text)
        except ValueError:
            return FORGOTTEN if self.are_in(text) else None
        kept = self._cleaned(value)
        return None if kept == value else json.dumps(kept, indent=2, ensure_ascii=False)

    def _cleaned(self, value: Any) -> Any:
        match value:
            case str():
                return FORGOTTEN if self.are_in(value) else value
            case dict():
                return {key: self._cleaned(part) for key, part in value.items()}
            case list():
                return [self._cleaned(part) for part in value]
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A text that speaks of the rows."""

    place: str
    remove: Callable[[], object]
    """Write the text without them."""


def traces_in_files(traces: Traces, directories: Sequence[Path], *, output: str) -> Iterator[Trace]:
    """Yield the files under the directories that speak of the rows, but not those of runs with another output."""
    for directory in directories:
        for file in sorted(directory.rglob("*")):
            if file.suffix not in _KINDS and not re.search(r"\.log\.\d+$", file.name):
                continue
            if not file.is_file() or _is_of_another(file.parent / SUMMARY_FILE, output):
                continue
            kept = traces.without(file.name, file.read_text(encoding="utf-8", errors="replace"))
            if kept is not None:
                yield Trace(place=str(file), remove=_writing(file, kept))


def traces_in_mlflow(traces: Traces, local_store: Path, *, output: str) -> Iterator[Trace]:
    """Yield the artifacts of the output's runs in MLflow that speak of the rows."""
    uri, is_local = store_uri(local_store)
    if is_local and not (local_store / "mlflow.db").exists():
        return
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    for run_id in _runs_of(client, output):
        with tempfile.TemporaryDirectory() as directory:
            for artifact in client.list_artifacts(run_id):
                if artifact.is_dir or Path(artifact.path).suffix not in _KINDS:
                    continue
                file = Path(client.download_artifacts(run_id, artifact.path, directory))
                kept = traces.without(artifact.path, file.read_text(encoding="utf-8", errors="replace"))
                if kept is not None:
                    yield Trace(
                        place=f"{artifact.path} of MLflow run {run_id}",
                        remove=_logging(client, run_id, artifact.path, kept),
                    )


def _runs_of(client: "MlflowClient", output: str) -> Iterator[str]:
    experiments = [one.experiment_id for one in client.search_experiments()]
    token = None
    while True:
        quote = '"' if "'" in output else "'"
        page = client.search_runs(
            experiments, filter_string=f"params.output = {quote}{output}{quote}", page_token=token
        )
        yield from (run.info.run_id for run in page)
        if not (token := page.token):
            return


def _writing(file: Path, text: str) -> Callable[[], object]:
    return lambda: file.write_text(text, encoding="utf-8")


def _logging(client: "MlflowClient", run_id: str, path: str, text: str) -> Callable[[], object]:
    return lambda: client.log_text(run_id, text, path)


def _is_of_another(summary: Path, output: str) -> bool:
    try:
        return bool(json.loads(summary.read_text(encoding="utf-8")).get("output", output) != output)
    except (OSError, ValueError):
        return False


def _begins(text: str, start: int, values: set[str]) -> bool:
    """Tell whether the text from ``start`` on begins with one of the values as a whole word."""
    lengths = {len(value) for value in values}
    ends = (start + length for length in lengths)
    return any(text[start:end] in values and not text[end : end + 1].isalnum() for end in ends)


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _text_of_page(html: str) -> str:
    # A <wbr> only says where a long word may be broken.
    return unescape(re.sub(r"<[^>]*>", " ", html.replace("<wbr>", "")))
