"""Find the file or the data that the source of an image names, and tell one version of a file from another.

Sources are those that Spark's users write: a path, ``file:`` and ``dbfs:`` URLs, ``data:`` URLs. What is at an http(s)
URL is fetched elsewhere, if that is allowed. Nothing here knows images: bytes are bytes.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from pipemax.generation import Image

_STANDARD_LETTERS = bytes.maketrans(b"-_", b"+/")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


class ImageSourceError(ValueError):
    """The bytes of an image cannot be had; the message says why, and names no more of the source than a user knows."""


def is_web_url(source: str) -> bool:
    """Tell whether the image would have to be fetched."""
    return source[:8].lower().startswith(("http://", "https://"))


def version_of(image: Image) -> list[int]:
    """Return what changes when the file of an image is written again; empty for other images, and without a file."""
    if image.source is None or _is_data_url(image.source) or is_web_url(image.source):
        return []
    try:
        status = path_of(image.source).stat()
    except (OSError, ValueError):
        return []
    return [status.st_size, status.st_mtime_ns]


def read_source(source: str, *, max_bytes: int, directories: Sequence[str]) -> bytes:
    """Return the bytes that a path, or a ``file:`` or ``data:`` URL, names. ``ImageSourceError`` says why not.

    Files must be in one of these directories.
    """
    if _is_data_url(source):
        return _bytes_of_data_url(source.strip(), max_bytes)
    try:
        path = path_of(source)
        resolved = path.resolve(strict=True)
        if not any(resolved.is_relative_to(directory) for directory in directories):
            raise ImageSourceError(
                f"{_shown(source)} is not in {' or '.join(directories)} (images.directories)"
            )
        if not resolved.is_file():  # reading a device or a pipe may never end
            raise ImageSourceError(f"{_shown(source)} is not a file")
        size = resolved.stat().st_size
        if size == 0:  # so do many files under /proc say, of which some can be read without end
            raise ImageSourceError(f"{_shown(source)} is empty")
        if size <= max_bytes:
            return resolved.read_bytes()
    except FileNotFoundError:
        raise ImageSourceError(f"{_shown(source)} does not exist on the executor") from None
    except OSError as error:
        raise ImageSourceError(f"{_shown(source)} cannot be read: {error.strerror or error}") from None
    except ImageSourceError:
        raise
    except ValueError as error:
        raise ImageSourceError(f"{_shown(source)} is no path: {error}") from None
    raise ImageSourceError(too_large(size, max_bytes, what=_shown(source)))


def too_large(size: int, max_bytes: int, *, what: str = "the image") -> str:
    """Return the message for an image that has too many bytes."""
    return f"{what} has {size:,} bytes, and images.max_bytes is {max_bytes:,}"


def path_of(source: str) -> Path:
    """Return the path on this machine. ``ImageSourceError`` if the source names none.

    ``file:/a%20b`` is a path as Hadoop and Spark's binaryFile write it, in which no character has a meaning, while
    ``file:///a%20b`` is a URL.
    """
    scheme, colon, rest = source.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        return _absolute(Path(source), source)
    is_url = rest.startswith("//")
    # Neither has a query or a fragment: # and ? are parts of names.
    path = unquote("/" + rest[2:].partition("/")[2]) if is_url else rest
    match scheme.lower():
        case "file":
            return _absolute(Path(path), source)
        case "dbfs" if path.startswith("/Volumes/"):
            return Path(path)
        case "dbfs":
            return Path("/dbfs") / path.lstrip("/")
    raise ImageSourceError(
        f"{_shown(source)} cannot be read: the engine reads local paths, /Volumes/…, file: and data: URLs, and http(s) "
        "URLs of allowed hosts. For other storage, give the bytes in a column (Spark's format binaryFile reads them)"
    )


def _absolute(path: Path, source: str) -> Path:
    if not path.is_absolute():
        raise ImageSourceError(f"{_shown(source)} is not an absolute path")
    return path


def _is_data_url(source: str) -> bool:
    return source.lstrip()[:5].lower() == "data:"


def _bytes_of_data_url(source: str, max_bytes: int) -> bytes:
    """Read the data as browsers do: line breaks, url-safe letters, escapes by % and missing padding are all allowed."""
    head, comma, body = source[5:].partition(",")
    if not comma:
        raise ImageSourceError("the data: URL has no comma before its data")
    if len(body) > 5 * max_bytes:  # base64 takes a third more, and an escape by % three letters for one
        raise ImageSourceError(too_large(len(body), max_bytes, what="the data: URL"))
    content = unquote_to_bytes(body)
    if "base64" in (parameter.strip() for parameter in head.lower().split(";")[1:]):
        letters = b"".join(content.split()).translate(_STANDARD_LETTERS).rstrip(b"=")
        try:
            content = base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageSourceError(f"the data: URL is not base64: {error}") from None
    if len(content) > max_bytes:
        raise ImageSourceError(too_large(len(content), max_bytes, what="the data: URL"))
    return content


def _shown(source: str) -> str:
    return repr(source if len(source) <= 160 else f"{source[:159]}…")
