"""Which GPUs an engine of this environment would see, by NVIDIA's own tool: no CUDA context, no torch."""

import csv
import logging
import shutil
import subprocess
from collections.abc import Mapping
from itertools import takewhile

log = logging.getLogger(__name__)

_SMI_TIMEOUT_S = 60.0
_SMI = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The UUIDs of the GPUs that CUDA would show under this environment; empty without NVIDIA's driver.

    A name in ``CUDA_VISIBLE_DEVICES`` that the driver does not list (a MIG instance) stands for itself.
    """
    command = shutil.which(_SMI[0], path=environ.get("PATH"))
    if command is None:
        return []
    try:
        listed = subprocess.run(
            [command, *_SMI[1:]], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not list the GPUs (%s): they are not locked", error)
        return []
    known = {row[0]: row[1] for row in csv.reader(listed.splitlines(), skipinitialspace=True) if row}
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return sorted(known.values())
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    # CUDA takes a negative number as the list's end: -1 alone hides every GPU.
    shown = takewhile(lambda name: not name.startswith("-"), names)
    return sorted({_uuid(name, known) for name in shown})


def _uuid(name: str, known: Mapping[str, str]) -> str:
    if name in known:
        return known[name]
    # CUDA takes the beginning of a UUID for the whole.
    return next((uuid for uuid in known.values() if uuid.startswith(name)), name)
