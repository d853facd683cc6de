"""Asks NVIDIA's own tool about the GPUs, without torch and without a CUDA context."""

import csv
import shutil
import subprocess
from collections.abc import Mapping

_SMI_TIMEOUT_S = 60.0


def nvidia_smi(environ: Mapping[str, str], *arguments: str) -> str | None:
    """Return what NVIDIA's own tool prints; None without NVIDIA's driver. Raise ``ValueError`` if it fails."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return None
    try:
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"nvidia-smi {arguments[0]} failed: {error}") from error


def csv_rows(listed: str) -> list[list[str]]:
    """Return the rows of a table that NVIDIA's tool has printed."""
    return [row for row in csv.reader(listed.splitlines(), skipinitialspace=True) if row]
