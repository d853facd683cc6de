"""What can be done to a job's processes on a node, and when the node has recovered from it."""

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipemax.wire import ProcessIdentity
from tests.spark.faults.cluster import Node, send, wait_patiently


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """Something that was done to a node."""

    node: Node
    victims: list[ProcessIdentity]
    """What must be gone before the node counts as recovered."""
    at_s: float

    def wait_until_recovered(self, is_over: Callable[[], bool]) -> float | None:
        """Wait until rows are done there again; return how long that took, in seconds, or None if the job was over
        before."""
        self._wait_until(
            lambda: not any(v.is_running() for v in self.victims), "is rid of what was struck", is_over
        )
        since = self.node.progress()
        self._wait_until(lambda: self.node.has_gone_on(since), "does rows again", is_over)
        return None if is_over() else time.monotonic() - self.at_s

    def _wait_until(self, condition: Callable[[], bool], what: str, is_over: Callable[[], bool]) -> None:
        wait_patiently(lambda: condition() or is_over(), f"{self.node.address} {what}")


def _strike(node: Node, number: signal.Signals, *victims: ProcessIdentity | None) -> Strike | None:
    found = [victim for victim in victims if victim is not None]
    if not found:
        return None
    send(number, found)
    return Strike(node=node, victims=found, at_s=time.monotonic())


def kill_executor(node: Node) -> Strike | None:
    server = node.server()
    strike = _strike(node, signal.SIGKILL, node.executor())
    if strike is not None and server is not None:
        strike.victims.append(server)  # it ends with its executor
    return strike


def kill_python_workers(node: Node) -> Strike | None:
    return _strike(node, signal.SIGKILL, *node.python_workers())


def kill_server(node: Node) -> Strike | None:
    return _strike(node, signal.SIGKILL, node.server())


def kill_engine_worker(node: Node) -> Strike | None:
    server = node.server()
    strike = _strike(node, signal.SIGKILL, node.engine_worker())
    if strike is not None and server is not None:
        strike.victims.append(server)  # an engine without its worker is dead, and its server ends
    return strike


def stop_server(node: Node) -> Strike | None:
    return _strike(node, signal.SIGSTOP, node.server())


def delete_socket(node: Node) -> Strike | None:
    path, server = node.socket(), node.server()
    if path is None or server is None:
        return None
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return Strike(node=node, victims=[server], at_s=time.monotonic())


def decommission_executor(node: Node) -> Strike | None:
    return _strike(node, signal.SIGPWR, node.executor())


STRIKES: dict[str, Callable[[Node], Strike | None]] = {
    "executor killed": kill_executor,
    "Python workers killed": kill_python_workers,
    "engine server killed": kill_server,
    "worker process of the engine killed": kill_engine_worker,
    "engine server stopped": stop_server,
    "socket deleted": delete_socket,
    "executor decommissioned": decommission_executor,
}
"""By name; None where there is nothing to strike just now."""
