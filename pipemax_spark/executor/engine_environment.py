"""Choose the environment variables that a process of the engine's Python gets from this process: only a short list.

The environment of a Spark Python worker does not fit an engine: PYTHONPATH would mix two sets of packages,
OMP_NUM_THREADS=1 would leave one core, an address-space limit would end vLLM at its start, and the worker factory's
secret must stay with the worker.
"""

import os
import resource
import sys
from collections.abc import Collection, Mapping

ENGINE_PYTHONPATH_VARIABLE = "PIPEMAX_ENGINE_PYTHONPATH"
"""Becomes the engine's PYTHONPATH, for a checkout that is not installed, as in this project's own tests."""

_NAMES = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "XDG_CACHE_HOME",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CC",
        "CXX",
        "OMP_WAIT_POLICY",
        *("http_proxy", "https_proxy", "no_proxy", "all_proxy"),
        *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    }
)
_PREFIXES = (
    "LC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "GLOO_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "VLLM_",
    "TORCH",
    "TRITON_",
    "FLASHINFER_",
)


def engine_environment(
    environ: Mapping[str, str] | None = None, *, keys: Collection[str] = ()
) -> dict[str, str]:
    """Return the environment for any process of the engine's Python, taken from ``environ`` or from this process.

    ``keys`` are further variables that it gets: those in which an endpoint's keys are.
    """
    source = os.environ if environ is None else environ
    names = _NAMES | set(keys)
    kept = {name: value for name, value in source.items() if name in names or name.startswith(_PREFIXES)}
    if ENGINE_PYTHONPATH_VARIABLE in source:
        kept["PYTHONPATH"] = source[ENGINE_PYTHONPATH_VARIABLE]
    return kept


def engine_command(engine_python: str | None, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the engine's environment; ``None`` means this interpreter.

    Run it with ``env=engine_environment(), cwd="/", stdin=DEVNULL or PIPE, close_fds=True``.
    """
    return [engine_python or sys.executable, "-m", module, *arguments]


def address_space_limit_fault() -> str | None:
    """Return why no engine can start from this process, or ``None``. A child inherits the limit on address space."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"this process may use only {limit / 2**30:.1f} GiB of address space (RLIMIT_AS), which an engine inherits "
        "and cannot start under. Spark sets the limit from spark.executor.pyspark.memory: leave that setting out."
    )
