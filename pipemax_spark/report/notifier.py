"""Post to a URL that a job has started, that its budget runs out, and how it ended.

The URL may be a secret, such as a chat's webhook, so only its host is ever shown. A post holds counts and names, and
nothing of a row, a prompt or an engine config. Nothing here fails a job, or delays its end by more than 15 s.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

_TRIES = 3
_TRY_S = 5.0
_PAUSE_S = 1.0
"""Pause after a try that failed at once."""


class Notifier:
    """Posts the events of one run; without a URL, none."""

    def __init__(
        self,
        url: str | None,
        *,
        run_id: str,
        output: str,
        warn: Callable[[str], None],
        try_s: float = _TRY_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._url = url
        self._names = {"run_id": run_id, "output": output}
        self._warn = warn
        self._try_s = try_s
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._has_warned = False
        self._threads: list[threading.Thread] = []
        self._started_s = time.monotonic()

    def start(self, *, rows_left: int) -> None:
        """Say that the run has begun, with ``rows_left`` rows to do."""
        self._send("start", rows=0, rows_left=rows_left)

    def budget(self, *, rows: int, rows_left: int, errors: int) -> None:
        """Say that the run's budget runs out, after ``rows`` rows with ``errors`` errors among them."""
        self._send("budget", rows=rows, rows_left=rows_left, errors=errors)

    def end(
        self, *, rows: int, rows_left: int | None, errors: int, ended_by: str | None, complete: bool
    ) -> None:
        """Say how the run ended, and wait until that has been posted or has failed, at most 15 s."""
        self._send("end", rows=rows, rows_left=rows_left, errors=errors, ended_by=ended_by, complete=complete)
        deadline_s = time.monotonic() + _TRIES * self._try_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                self._warn_once("no answer")

    def _send(
        self,
        event: str,
        *,
        rows: int,
        rows_left: int | None,
        errors: int = 0,
        ended_by: str | None = None,
        complete: bool = False,
    ) -> None:
        if self._url is None:
            return
        body = {
            "event": event,
            **self._names,
            "rows": rows,
            "rows_left": rows_left,
            "errors": errors,
            "seconds": round(time.monotonic() - self._started_s, 1),
            "ended_by": ended_by,
            "complete": complete,
        }
        thread = threading.Thread(
            target=self._post, args=(self._url, body), name="pipemax-notify", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            self._warn_once(str(error))
        else:
            self._threads.append(thread)

    def _post(self, url: str, body: dict[str, Any]) -> None:
        fault = ""
        for number in range(_TRIES):
            try:
                request = urllib.request.Request(
                    url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
                )
                with _OPENER.open(request, timeout=self._try_s):
                    return
            except TimeoutError:
                fault = f"no answer within {self._try_s:g} s"
            except Exception as error:  # whatever it is, it may quote the URL, and it must not end the job
                fault = _described(error)
                if number < _TRIES - 1:
                    time.sleep(self._pause_s)
        self._warn_once(fault)

    def _warn_once(self, fault: str) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        host = urlsplit(self._url or "").hostname
        self._warn(f"--notify: {host} could not be told of this run ({fault}); the run does not depend on it")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: another host must not get the post, and a redirected post would lose its body."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _described(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    reason = getattr(error, "reason", None)
    if isinstance(reason, OSError):
        return reason.strerror or type(reason).__name__
    return type(error).__name__
