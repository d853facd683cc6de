"""Ask for known vulnerabilities of the locked packages: tools/audit.py UV [LOCK…]. Status 1: there are some.

An index that serves no advisories, as most mirrors, is said, and is no failure.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_TOOL = "pip-audit==2.10.1"
_LOCKS = ("cpu", "gpu", "spark")


def audit(uv: str, lock: Path) -> list[dict[str, Any]]:
    """Return what pip-audit says of each package of a lock. ``RuntimeError`` if it says nothing."""
    command = [uv, "tool", "run", "--from", _TOOL, "pip-audit", "--requirement", str(lock), "--no-deps"]
    command += ["--disable-pip", "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise RuntimeError(done.stderr.strip()[-300:]) from None
    return packages


def findings(packages: Iterable[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Return how many packages were looked up, and a line for each vulnerability."""
    looked_up = [package for package in packages if "vulns" in package]
    lines = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in looked_up
        for vulnerability in package["vulns"]
    ]
    return len(looked_up), lines


def main() -> int:
    """Print what is known of each lock."""
    uv, *named = sys.argv[1:]
    has_any = False
    for lock in named or [f"requirements/{name}.lock" for name in _LOCKS]:
        try:
            count, lines = findings(packages := audit(uv, Path(lock)))
        except (OSError, RuntimeError) as error:
            print(f"{lock}: not audited: {error}")
            continue
        print(
            f"{lock}: advisories were to be had for {count} of {len(packages)} packages, {len(lines)} found"
        )
        print("".join(f"  {line}\n" for line in lines), end="")
        has_any |= bool(lines)
    return int(has_any)


if __name__ == "__main__":
    sys.exit(main())
