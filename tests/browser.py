"""Open a page in headless Chromium, and return what became of it."""

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="needs Chromium (Debian: apt-get install chromium)"
)


def open_page(address: str, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Return the page's document once it has loaded, and what it wrote to the console."""
    assert BROWSER is not None
    run = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *flags),
            *(f"--user-data-dir={profile}", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]
