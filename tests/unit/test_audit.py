"""tools/audit.py: known vulnerabilities of the locked packages end it with status 1, and silence is said."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOUND = """{"dependencies": [{"name": "jinja2", "version": "2.4.1", "vulns": [
  {"id": "PYSEC-2014-8", "fix_versions": ["2.7.3"]}, {"id": "PYSEC-2014-82", "fix_versions": []}]},
  {"name": "torch", "skip_reason": "not found"}, {"name": "six", "version": "1", "vulns": []}], "fixes": []}"""
SKIPPED = '{"dependencies": [{"name": "six", "skip_reason": "not found"}], "fixes": []}'


@pytest.mark.parametrize(
    ("says", "status", "printed"),
    [
        (
            FOUND,
            1,
            "a.lock: advisories were to be had for 2 of 3 packages, 2 found\n"
            "  jinja2 2.4.1: PYSEC-2014-8, fixed in 2.7.3\n"
            "  jinja2 2.4.1: PYSEC-2014-82, fixed in no version yet\n",
        ),
        (SKIPPED, 0, "a.lock: advisories were to be had for 0 of 1 packages, 0 found\n"),
        ("no route to the index", 0, "a.lock: not audited: it failed\n"),
    ],
)
def test_the_audit_says_what_is_known_and_what_was_not_asked(
    tmp_path: Path, says: str, status: int, printed: str
) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\necho it failed >&2\n")
    uv.chmod(0o755)
    command = [sys.executable, "tools/audit.py", str(uv), "a.lock"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, printed)
