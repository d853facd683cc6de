"""The output of the GPU benches: Markdown tables, and one JSON file with where it was measured."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def require_cuda(program: str) -> torch.device:
    """Return the current GPU. Raise ``SystemExit`` with one sentence if there is none."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"{program} needs a CUDA device, and torch {torch.__version__} finds none: run it where nvidia-smi lists a "
            "GPU, with torch's CUDA build (docs/results/gpu.md says what else)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def at_least_one(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def print_table(title: str, rows: Sequence[Any]) -> None:
    """Print a Markdown table. ``rows`` are dataclass instances of one kind, at least one."""
    print(f"\n## {title}\n")
    cells = [{name: _cell(value) for name, value in asdict(row).items()} for row in rows]
    print("| " + " | ".join(cells[0]) + " |")
    print("|" + " --- |" * len(cells[0]))
    for row in cells:
        print("| " + " | ".join(row.values()) + " |", flush=True)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "–" if value is None else str(value)


def environment(device: torch.device, command: Sequence[str]) -> dict[str, str]:
    """Return device, versions, date and command: without them a figure says nothing."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(command),
    }


def write_json(path: Path, measured_on: Mapping[str, str], sections: Mapping[str, Any]) -> None:
    """Write the results, replacing the file: benches write after each part, so that a failure loses none before it."""
    document = {"measured_on": dict(measured_on), **sections}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
