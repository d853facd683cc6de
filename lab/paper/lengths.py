"""Open the lengths of a workload by a name: a profile's, or recorded ones."""

import json
from pathlib import Path

import numpy as np

from pipemax.presets import load_workload
from pipemax.sim.workloads import Workload, draw_workload


def open_workload(name: str, num_requests: int, seed: int = 0) -> Workload:
    """Open a shipped profile, a ``.yaml`` profile, or the lengths recorded in a ``.jsonl`` file (all of its rows)."""
    if name.endswith(".jsonl"):
        return replay_workload(Path(name))
    return draw_workload(load_workload(name), num_requests, np.random.default_rng(seed))


def replay_workload(path: Path, shared_prefix_tokens: int = 0) -> Workload:
    """Read recorded lengths from JSON lines, each with ``prompt_tokens`` and ``completion_tokens``.

    Raise ``ValueError`` for a line without them, and for a file without rows.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append((int(row["prompt_tokens"]), int(row["completion_tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: needs prompt_tokens and completion_tokens: {error}"
            ) from error
    if not rows:
        raise ValueError(f"{path} has no rows")
    lengths = np.array(rows, dtype=np.int64)
    return Workload(
        name=path.stem,
        prompt_tokens=lengths[:, 0],
        output_tokens=lengths[:, 1],
        shared_prefix_tokens=shared_prefix_tokens,
    )
