"""Read and check the URL that a run is to post to, without repeating it: it may be a secret."""

import os
from urllib.parse import urlsplit

from pipemax_spark.errors import JobError

_VARIABLE = "PIPEMAX_NOTIFY_URL"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def default_url() -> str | None:
    """Return the URL from the environment, which Spark's event log does not hold; a command's arguments it does."""
    return os.environ.get(_VARIABLE) or None


def check_url(url: str) -> None:
    """Raise ``JobError``, which does not repeat the URL, if it is not one of https, or of http on this machine."""
    try:
        parts = urlsplit(url)
        is_fine = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_fine = False
    if not is_fine or any(c.isspace() or not c.isascii() for c in url):
        raise JobError("notify is not a URL; give one such as https://host/path")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise JobError("notify is not a URL of https; http is for this machine only")
