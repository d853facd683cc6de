"""Find the GPUs that an executor's engine may use: all GPUs of the executor, which a task's own addresses do not show.

The module looks in this order:

1. the file in which Spark's worker names the executor's resources (standalone and local-cluster);
2. else what the executor's own environment says (``CUDA_VISIBLE_DEVICES``, as set by a container or by hand);
3. else what Spark's own discovery script prints here, if the application names one: YARN and Kubernetes run it for each
  executor, and do not pass its result on;
4. else nothing: the engine takes every GPU that the executor's process can see, as in a container, or where an
   executor has its node to itself.
"""

import json
import logging
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_SCRIPT_TIMEOUT_S = 60.0


def gpu_environment(executor_pid: int, discovery_script: str | None = None) -> dict[str, str]:
    """Return the variables for the engine of the executor with this JVM; empty if there is nothing to add.

    ``discovery_script`` is the application's, if it has one (``pipemax_spark.spark.profiles``).
    """
    addresses = _resource_file_addresses(executor_pid)
    if addresses is None and discovery_script is not None and _VISIBLE_DEVICES not in os.environ:
        addresses = _discovered_addresses(discovery_script)
    if addresses is None:
        return {}
    # Discovery scripts number GPUs as nvidia-smi does; CUDA by itself would begin with the fastest.
    return {_VISIBLE_DEVICES: ",".join(addresses), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _discovered_addresses(script: str) -> list[str] | None:
    """Run the script and read its output as Spark does: ``{"name": "gpu", "addresses": ["0", "1"]}``.

    None if the script fails.
    """
    try:
        printed = subprocess.run(
            [script], capture_output=True, text=True, timeout=_SCRIPT_TIMEOUT_S, check=True
        ).stdout
        return [str(address) for address in json.loads(printed)["addresses"]]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        log.warning(
            "the GPU discovery script %s fails here (%r): the engine takes every GPU it sees", script, error
        )
        return None


def _resource_file_addresses(executor_pid: int) -> list[str] | None:
    """Return the GPUs that Spark's worker gave to the executor; None if its file does not mention GPUs."""
    try:
        arguments = Path(f"/proc/{executor_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if "--resourcesFile" not in arguments:
            return None
        allocations = json.loads(Path(arguments[arguments.index("--resourcesFile") + 1]).read_text())
        return _gpus_of(allocations)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        log.warning("the executor's resources cannot be read (%r): its engine takes every GPU it sees", error)
        return None


def _gpus_of(allocations: Iterable[dict[str, Any]]) -> list[str] | None:
    for allocation in allocations:
        if allocation["id"]["resourceName"] == "gpu":
            return [str(address) for address in allocation["addresses"]]
    return None
