"""Files by tasks: what ``HadoopFiles`` does in the driver's JVM, for a client of Spark Connect, which has none.

Each call is a Spark job of one task, which opens the path as the spool does (``executor.spool``), with Arrow's own file
systems. So paths are those of the executors, which must all see the same files; a call waits for a task slot.
"""

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pyarrow import fs

from pipemax_spark.executor.spool import arrow_location, spool_fault
from pipemax_spark.spark.executor_call import call_on_executor
from pipemax_spark.spark.session import is_connect
from pipemax_spark.storage.hadoop import HadoopFiles, StoredFile, is_remote, plain_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CHECKSUM = re.compile(r"\..*\.crc")
"""Name of the file in which Hadoop keeps another local file's checksum."""


class ExecutorFiles:
    """Reads, writes and lists files, as ``HadoopFiles``."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark

    def qualified(self, path: str) -> str:
        """Return the absolute path as every process of the application understands it; no ``file:`` on local paths."""
        return plain_path(path) if is_remote(path) else str(self._call(os.path.abspath, plain_path(path)))

    def exists(self, path: str) -> bool:
        return bool(self._call(_exists, path))

    def read_text(self, path: str) -> str:
        text = self._call(_text, path)
        if text is None:
            raise FileNotFoundError(path)
        return str(text)

    def write_text(self, path: str, text: str) -> None:
        """Write the file, or replace it, and make the directories above it."""
        self._call(_write, path, text)

    def modified_ms(self, path: str) -> int | None:
        """Return the storage's own time stamp, or None if there is no such file."""
        modified: int | None = self._call(_modified_ms, path)
        return modified

    def list(self, path: str) -> list[StoredFile]:
        """Return the entries of the directory; none if it does not exist."""
        entries = self._call(_entries, path)
        return [
            StoredFile(path=f"{path.rstrip('/')}/{name}", name=name, is_directory=is_directory)
            for name, is_directory in entries
        ]

    def delete(self, path: str) -> None:
        """Delete the path with everything under it; do nothing if it does not exist.

        Only for directories with one of our markers (``WorkDirectory``).
        """
        self._call(_delete, path)

    def delete_if_empty(self, path: str) -> None:
        """Delete the directory if it holds nothing; leave it otherwise. On an object store there is none to delete."""
        if not is_remote(arrow_location(path)):
            self._call(_delete_if_empty, path)

    def _call(self, function: Callable[..., Any], *arguments: str) -> Any:
        return call_on_executor(self._spark, partial(function, *arguments))


Files: TypeAlias = HadoopFiles | ExecutorFiles


def files_of(spark: "SparkSession") -> Files:
    """Return the files that the session's Spark sees."""
    return ExecutorFiles(spark) if is_connect(spark) else HadoopFiles(spark)


def spool_fault_of(spark: "SparkSession", path: str) -> str | None:
    """Return why tasks could not spool there, as far as this session can tell; None if they can."""
    if is_connect(spark):
        fault: str | None = call_on_executor(spark, partial(spool_fault, path))
        return fault
    return spool_fault(path)


def _open(path: str) -> tuple[fs.FileSystem, str]:
    storage, opened = fs.FileSystem.from_uri(arrow_location(path))
    return storage, opened


def _info(path: str) -> fs.FileInfo:
    storage, opened = _open(path)
    return storage.get_file_info(opened)


def _exists(path: str) -> bool:
    return bool(_info(path).type != fs.FileType.NotFound)


def _text(path: str) -> str | None:
    storage, opened = _open(path)
    try:
        with storage.open_input_stream(opened) as stream:
            return bytes(stream.read()).decode(errors="replace")
    except FileNotFoundError:
        return None


def _write(path: str, text: str) -> None:
    storage, opened = _open(path)
    directory, _, name = opened.rpartition("/")
    storage.create_dir(directory)
    if isinstance(
        storage, fs.LocalFileSystem
    ):  # a checksum that Hadoop has left would be that of another text
        Path(directory, f".{name}.crc").unlink(missing_ok=True)
    with storage.open_output_stream(opened) as stream:
        stream.write(text.encode())


def _modified_ms(path: str) -> int | None:
    modified_ns = _info(path).mtime_ns
    return None if modified_ns is None else modified_ns // 1_000_000


def _entries(path: str) -> list[tuple[str, bool]]:
    storage, opened = _open(path)
    infos = storage.get_file_info(fs.FileSelector(opened, allow_not_found=True))
    return [
        (info.base_name, info.type == fs.FileType.Directory)
        for info in infos
        if not _CHECKSUM.fullmatch(info.base_name)
    ]


def _delete(path: str) -> None:
    storage, opened = _open(path)
    kind = storage.get_file_info(opened).type
    with contextlib.suppress(FileNotFoundError):
        if kind == fs.FileType.Directory:
            storage.delete_dir(opened)
        elif kind == fs.FileType.File:
            storage.delete_file(opened)


def _delete_if_empty(path: str) -> None:
    _, opened = _open(path)
    # Another run may have written to it since: then it is not empty, and stays.
    with contextlib.suppress(OSError):
        Path(opened).rmdir()
