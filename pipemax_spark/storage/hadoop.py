"""Read and write small files on any storage that Spark sees, through Hadoop's own client in the driver's JVM."""

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One entry of a directory."""

    path: str
    name: str
    is_directory: bool


class HadoopFiles:
    """Reads, writes and lists files; ``FileNotFoundError`` if a file to read is not there."""

    def __init__(self, spark: "SparkSession") -> None:
        assert spark._jvm is not None, "the session has no JVM"
        self._jvm = spark._jvm
        self._configuration = spark._jsc.hadoopConfiguration()

    def qualified(self, path: str) -> str:
        """Return the absolute path as every process of the application understands it; no ``file:`` on local paths."""
        hadoop_path, file_system = self._open(path)
        return plain_path(str(file_system.makeQualified(hadoop_path).toString()))

    def exists(self, path: str) -> bool:
        hadoop_path, file_system = self._open(path)
        return bool(file_system.exists(hadoop_path))

    def read_text(self, path: str) -> str:
        hadoop_path, file_system = self._open(path)
        if not file_system.exists(hadoop_path):
            raise FileNotFoundError(path)
        stream = file_system.open(hadoop_path)
        try:
            return bytes(self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(stream)).decode()
        finally:
            stream.close()

    def write_text(self, path: str, text: str) -> None:
        """Write the file, or replace it, and make the directories above it."""
        hadoop_path, file_system = self._open(path)
        stream = file_system.create(hadoop_path, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def modified_ms(self, path: str) -> int | None:
        """Return the storage's own time stamp, or None if there is no such file."""
        hadoop_path, file_system = self._open(path)
        if not file_system.exists(hadoop_path):
            return None
        return int(file_system.getFileStatus(hadoop_path).getModificationTime())

    def list(self, path: str) -> list[StoredFile]:
        """Return the entries of the directory; none if it does not exist."""
        hadoop_path, file_system = self._open(path)
        if not file_system.exists(hadoop_path):
            return []
        return [
            StoredFile(
                path=plain_path(str(status.getPath().toString())),
                name=str(status.getPath().getName()),
                is_directory=bool(status.isDirectory()),
            )
            for status in file_system.listStatus(hadoop_path)
        ]

    def delete(self, path: str) -> None:
        """Delete the path with everything under it; do nothing if it does not exist.

        Only ``WorkDirectory`` may call this, for what lies under a marker of ours.
        """
        hadoop_path, file_system = self._open(path)
        file_system.delete(hadoop_path, True)

    def delete_if_empty(self, path: str) -> None:
        """Delete the directory if it holds nothing; leave it otherwise."""
        from py4j.protocol import Py4JJavaError

        if self.exists(path) and not self.list(path):
            hadoop_path, file_system = self._open(path)
            # Another run may have written to it since: then it is not empty, and stays.
            with contextlib.suppress(Py4JJavaError):
                file_system.delete(hadoop_path, False)

    def _open(self, path: str) -> tuple["JavaObject", "JavaObject"]:
        hadoop_path = self._jvm.org.apache.hadoop.fs.Path(path)
        return hadoop_path, hadoop_path.getFileSystem(self._configuration)


def plain_path(path: str) -> str:
    """Strip the scheme where it says nothing: ``file:/a`` and ``file:///a`` become ``/a``."""
    return re.sub(r"^file:(//)?(?=/)", "", path)


def is_remote(path: str) -> bool:
    """Tell whether the path has a scheme that ``plain_path`` does not strip, as on remote storage."""
    return re.match(r"^[a-z][a-z0-9+.-]*:", plain_path(path)) is not None
