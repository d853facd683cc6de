"""The network between a driver and its executors: a proxy on the loopback that delays and cuts connections.

The driver binds its ports to one address of the loopback and names another one, where the proxy listens.
"""

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_DRIVER = "127.0.0.1"
_CHUNK = 1 << 16


class Network:
    """With it, what is sent to ``host`` at ``ports`` reaches the driver's same ports, through this process."""

    def __init__(self, host: str, *, ports: int = 3) -> None:
        self.host = host
        self.delay_s = 0.0
        """How long each piece waits, in both directions."""
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._listeners = [self._listen() for _ in range(ports)]
        self.ports = [listener.getsockname()[1] for listener in self._listeners]

    def __enter__(self) -> Self:
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            listener.close()
        self.cut()

    def cut(self) -> int:
        """Close all connections; return how many there were. New ones may be made at once."""
        with self._lock:
            cut, self._connections = self._connections, []
        for connection in cut:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        return len(cut) // 2

    def _listen(self) -> socket.socket:
        """Listen at a port that is free at the driver's address, too."""
        while True:
            listener = socket.create_server((self.host, 0), backlog=64)
            with contextlib.suppress(OSError), socket.create_server((_DRIVER, listener.getsockname()[1])):
                return listener
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                outer, _ = listener.accept()
            except OSError:
                return
            try:
                inner = socket.create_connection((_DRIVER, listener.getsockname()[1]))
            except OSError:  # the driver is gone
                outer.close()
                continue
            with self._lock:
                self._connections += [outer, inner]
            for source, sink in ((outer, inner), (inner, outer)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_CHUNK):
                if self.delay_s:
                    time.sleep(self.delay_s)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
