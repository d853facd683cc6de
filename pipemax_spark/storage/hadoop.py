"""Read and write small files on any storage that Spark sees, through Hadoop's own client in the driver's JVM."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError, cause_of
from pipemax_spark.spark.session import is_connect

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import SparkSession


LITERAL_PATH = {"__globPaths__": "false"}
"""The option of Spark's readers with which a path is no pattern: a directory may be called ``a [b]``."""


_WITHOUT_CHECKSUMS = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Options of Spark's readers with which local files are read without looking for their checksums. Hadoop cannot make
the name of a checksum's file if a file is called ``10:30.csv``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One entry of a directory."""

    path: str
    name: str
    is_directory: bool


class HadoopFiles:
    """Reads, writes and lists files.

    Raise ``FileNotFoundError`` if a file to read is not there, and ``ValueError`` if it does not match its checksum.
    """

    def __init__(self, spark: "SparkSession") -> None:
        if is_connect(spark):
            raise JobError(
                "over Spark Connect this needs a file of this machine or a Delta table, not other storage"
            )
        self._jvm: Any = spark._jvm
        self._configuration = spark._jsc.hadoopConfiguration()

    def qualified(self, path: str) -> str:
        """Return the absolute path as every process of the application understands it; no ``file:`` on local paths."""
        hadoop_path, file_system = self._open(path)
        return plain_path(str(file_system.makeQualified(hadoop_path).toString()))

    def exists(self, path: str) -> bool:
        hadoop_path, file_system = self._open(path)
        return bool(file_system.exists(hadoop_path))

    def read_text(self, path: str) -> str:
        return self._read(path, self._jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray).decode()

    def read_beginning(self, path: str, num_bytes: int) -> bytes:
        """Return the first bytes of the file, or all if it has fewer."""
        return self._read(path, lambda stream: stream.readNBytes(num_bytes))

    def _read(self, path: str, read: Callable[["JavaObject"], Any]) -> bytes:
        from py4j.protocol import Py4JJavaError

        hadoop_path, file_system = self._open(path)
        if not file_system.exists(hadoop_path):
            raise FileNotFoundError(path)
        stream = file_system.open(hadoop_path)
        try:
            return bytes(read(stream))
        except Py4JJavaError as error:
            # The machine may have died while the file was written. Callers take it like a torn text.
            if error.java_exception.getClass().getSimpleName() == "ChecksumException":
                raise ValueError(f"{path} does not match its checksum") from error
            raise
        finally:
            stream.close()

    def ends(self, uri: str, num_bytes: int) -> tuple[bytes, bytes] | None:
        """Return the first and the last bytes of a file that Spark names by its URI; None for a compressed one."""
        hadoop_path = self._jvm.org.apache.hadoop.fs.Path(self._jvm.java.net.URI(uri))
        compression = self._jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(self._configuration)
        if compression.getCodec(hadoop_path) is not None:
            return None
        file_system = hadoop_path.getFileSystem(self._configuration)
        if ":" in hadoop_path.getName() and str(file_system.getScheme()) == "file":
            file_system = self._jvm.org.apache.hadoop.fs.RawLocalFileSystem()  # see _WITHOUT_CHECKSUMS
            file_system.initialize(self._jvm.java.net.URI("file:///"), self._configuration)
        size = int(file_system.getFileStatus(hadoop_path).getLen())
        stream = file_system.open(hadoop_path)
        read = self._jvm.org.apache.commons.io.IOUtils.toByteArray
        try:
            first = bytes(read(stream, min(size, num_bytes)))
            stream.seek(max(0, size - num_bytes))
            return first, bytes(read(stream, min(size, num_bytes)))
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

    def put(self, local: Path, path: str) -> None:
        """Move a file of this machine there, in the place of an older one."""
        hadoop_path, file_system = self._open(path)
        file_system.copyFromLocalFile(
            True, True, self._jvm.org.apache.hadoop.fs.Path(str(local)), hadoop_path
        )

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

        Only for directories with one of our markers (``WorkDirectory``), and for a cascade's parts.
        """
        hadoop_path, file_system = self._open(path)
        file_system.delete(hadoop_path, True)

    def rename(self, path: str, new_path: str) -> None:
        """Give the path, which exists, another name, which nothing has."""
        hadoop_path, file_system = self._open(path)
        file_system.rename(hadoop_path, self._jvm.org.apache.hadoop.fs.Path(new_path))

    def delete_if_empty(self, path: str) -> None:
        """Delete the directory if it holds nothing; leave it otherwise."""
        from py4j.protocol import Py4JJavaError

        if self.exists(path) and not self.list(path):
            hadoop_path, file_system = self._open(path)
            # Another run may have written to it since: then it is not empty, and stays.
            with contextlib.suppress(Py4JJavaError):
                file_system.delete(hadoop_path, False)

    def _open(self, path: str) -> tuple["JavaObject", "JavaObject"]:
        if ":" in path.partition("/")[0] and not is_remote(path) and not path.startswith("file:/"):
            path = f"./{path}"  # a name such as 10:30, which Hadoop would take for a scheme
        hadoop_path = self._jvm.org.apache.hadoop.fs.Path(path)
        return hadoop_path, hadoop_path.getFileSystem(self._configuration)


def options_for_files(path: str, *, is_pattern: bool) -> dict[str, str]:
    """Return the options with which Spark's readers read the files of a path, or of a pattern, of any name."""
    options = {} if is_pattern else dict(LITERAL_PATH)
    if not is_remote(path):
        top = re.split(r"/[^/]*[*?\[{]", plain_path(path))[0] if is_pattern else plain_path(path)
        if ":" in Path(top).name or any(":" in name for _, _, names in os.walk(top) for name in names):
            options |= _WITHOUT_CHECKSUMS
    return options


def plain_path(path: str) -> str:
    """Strip the scheme if it adds no information: ``file:/a`` and ``file:///a`` become ``/a``."""
    return re.sub(r"^file:(//)?(?=/)", "", path)


def is_remote(path: str) -> bool:
    """Tell whether the path has a scheme that ``plain_path`` does not strip, as on remote storage."""
    return re.match(r"^[a-z][a-z0-9+.-]*:/", plain_path(path)) is not None


def read_file(path: str, session: Callable[[], "SparkSession"], *, option: str) -> str:
    """Return the text of a file: on this machine, or on remote storage by ``session()``, which is called only for that.

    Raise ``JobError`` that names the option if the file cannot be read.
    """
    try:
        if not is_remote(path):
            return Path(plain_path(path)).read_text(encoding="utf-8")
        with _storage_errors():
            return HadoopFiles(session()).read_text(path)
    except (OSError, ValueError) as error:
        cause = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise JobError(f"{option.replace('_', '-')} {path!r} cannot be read: {cause}") from error


def write_file(path: str, text: str, spark: "SparkSession") -> None:
    """Write the file, or replace it, where ``read_file`` would read it. Raise ``OSError`` if that is impossible."""
    if is_remote(path):
        with _storage_errors():
            HadoopFiles(spark).write_text(path, text)
        return
    file = Path(plain_path(path))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def check_storage(path: str, spark: "SparkSession", *, option: str) -> None:
    """Raise ``JobError`` that names the option if the path is on storage that the session does not know."""
    try:
        with _storage_errors():
            HadoopFiles(spark).qualified(path)
    except OSError as error:
        raise JobError(f"{option.replace('_', '-')} {path!r} cannot be written: {error}") from error


@contextlib.contextmanager
def _storage_errors() -> Iterator[None]:
    """Turn the JVM's errors into ``OSError``."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        raise OSError(cause_of(error)) from error
