"""Folders of other programs in a work directory, and whether a job has touched them."""

import json
from pathlib import Path


class ForeignFolders:
    """Folders with files that no job may change."""

    def __init__(self) -> None:
        self._files: dict[Path, bytes] = {}

    @property
    def num_files(self) -> int:
        return len(self._files)

    def add(self, directory: Path, *, has_marker: bool) -> None:
        """Make a folder with some files; with a marker, one of them is another program's ``owner.json``."""
        marker = {"kind": "another program", "run_id": directory.name, "pid": 1, "start_ticks": 1}
        files = {
            "notes.txt": b"not ours\n",
            "spool/chunk-0/part-0.parquet": bytes(range(256)),
            "heartbeat": b"",
        }
        if has_marker:
            files["owner.json"] = json.dumps(marker).encode()
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._files[path] = content

    def touched(self) -> list[Path]:
        """Return the files that are gone or changed."""
        return [
            path
            for path, content in self._files.items()
            if not path.is_file() or path.read_bytes() != content
        ]
