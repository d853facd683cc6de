"""Which GPUs an executor's engine may use: all of the executor's, which no task's own addresses tell.

Looked up in this order:

1. the file in which Spark's worker names the executor's resources (standalone and local-cluster);
2. else what the executor's own environment says (``CUDA_VISIBLE_DEVICES``, as set by a container or by hand);
3. else nothing: every GPU that the executor's process can see, as in a container of YARN or Kubernetes, or where an
   executor has its node to itself.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def gpu_environment(executor_pid: int) -> dict[str, str]:
    """Variables for the engine of the executor whose JVM this is; empty where there is nothing to add."""
    addresses = _addresses(executor_pid)
    return {} if addresses is None else {_VISIBLE_DEVICES: ",".join(addresses)}


def _addresses(executor_pid: int) -> list[str] | None:
    """The GPUs that Spark gave to the executor; None where it says nothing of GPUs."""
    try:
        arguments = Path(f"/proc/{executor_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if "--resourcesFile" not in arguments:
            return None
        allocations = json.loads(Path(arguments[arguments.index("--resourcesFile") + 1]).read_text())
        return _gpus_of(allocations)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        log.warning("the executor's resources cannot be read (%r): its engine takes every GPU it sees", error)
        return None


def _gpus_of(allocations: Iterable[dict[str, object]]) -> list[str] | None:
    for allocation in allocations:
        if allocation["id"]["resourceName"] == "gpu":  # type: ignore[index]
            return [str(address) for address in allocation["addresses"]]  # type: ignore[attr-defined]
    return None
