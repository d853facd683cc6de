"""Records what a system measures while it runs, on disk after every run, so that a later failure loses no figure."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa

from lab.bench.peers.load import Load


@dataclass(kw_only=True)
class Measurement:
    """One system's figures, as far as it has come."""

    engines: int = 1
    start_s: list[float] = field(default_factory=list)
    """Seconds of each start, before the first timed row: imports, Spark or Ray, the engine's start, a warm-up."""
    seconds: list[float] = field(default_factory=list)
    """Seconds of each run, from table to outputs on disk; less for Ray, see ``lab/bench/peers/ray_data.py``."""
    output_tokens: int = 0
    """Output tokens of one run: the same for all systems, row by row, or the run does not count."""


class Recorder:
    """Takes a system's figures and writes them to ``path`` each time."""

    def __init__(self, load: Load, path: Path, engines: int) -> None:
        self._load = load
        self._path = path
        self._measured = Measurement(engines=engines)

    def started(self, seconds: float) -> None:
        self._measured.start_s.append(round(seconds, 1))
        self._write()

    def ran(self, seconds: float, tokens_by_id: dict[int, int]) -> None:
        """Record a run. Raise ``ValueError`` unless the answers are as long as asked for."""
        self._measured.output_tokens = self._load.check_answers(tokens_by_id)
        self._measured.seconds.append(round(seconds, 2))
        self._write()

    def _write(self) -> None:
        partly = self._path.with_suffix(".partly")
        partly.write_text(json.dumps(asdict(self._measured)))
        partly.replace(self._path)


def tokens_by_id(answers: pa.Table) -> dict[int, int]:
    """Return tokens by id from a table with the columns ``id`` and ``tokens``; ``ValueError`` if an id is duplicate."""
    ids = answers["id"].to_pylist()
    if doubled := len(ids) - len(set(ids)):
        raise ValueError(f"{doubled} of {len(ids)} rows were written twice")
    return dict(zip(ids, answers["tokens"].to_pylist(), strict=True))
