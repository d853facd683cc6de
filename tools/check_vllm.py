"""Check another vLLM's wheel for what we rely on, without installing it.

``python tools/check_vllm.py 0.33.0``; without a version, the newest that is supported. The wheel's sources are read,
not run, so a wheel for GPUs is checked on any machine. It is downloaded once.
"""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pipemax.vllm_ext.seam.relied_on import TUNABLE_ATTRIBUTES, TUNABLE_METHODS
from pipemax.vllm_ext.seam.supported import SUPPORTED_VERSIONS
from pipemax.vllm_ext.seam.version import lacks

_CACHE = Path(__file__).resolve().parents[1] / "artifacts" / "vllm"


def sources_of(version: str) -> Path:
    """Return the directory that holds the sources of this version; download its wheel if they are not there."""
    root = _CACHE / version
    if not (root / "vllm").is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--dest", str(root)]
        subprocess.run([*command, f"vllm=={version}"], check=True)
        (wheel,) = root.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root, [name for name in archive.namelist() if name.endswith(".py")])
        wheel.unlink()
    return root


def main(versions: Sequence[str]) -> int:
    """Print what each version lacks; return 1 if any lacks something."""
    lacking = False
    for version in versions or SUPPORTED_VERSIONS[-1:]:
        root = sources_of(version)
        faults = [*lacks(root), *lacks(root, TUNABLE_METHODS, TUNABLE_ATTRIBUTES)]
        print(f"vLLM {version}: {'nothing is missing' if not faults else 'we need'}")
        for fault in faults:
            print(f"  {fault}")
        lacking |= bool(faults)
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
