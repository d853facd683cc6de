"""A driver's clock that can be set back where libfaketime is, as Debian has it or where PIPEMAX_LIBFAKETIME says."""

import os
from pathlib import Path

LIBRARY = Path(os.environ.get("PIPEMAX_LIBFAKETIME", "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"))


class Clock:
    """What one process and its children take for the time of day; their monotonic clocks are the machine's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("+0\n")

    @staticmethod
    def can_be_set() -> bool:
        return LIBRARY.exists()

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that is to go by this clock."""
        if not self.can_be_set():
            return {}
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set_back(self, seconds: int) -> None:
        self._file.write_text(f"-{seconds}\n")
