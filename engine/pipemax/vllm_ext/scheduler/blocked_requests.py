"""Set requests aside while their grammars are compiled, without a look at each of them in every step.

vLLM compiles on threads, each of which reports here when it is done. The controller does not know such requests yet.
"""

from queue import SimpleQueue

from pipemax.vllm_ext.seam.planned_scheduler import when_compiled
from pipemax.vllm_ext.seam.vllm_types import Request


class BlockedRequests:
    """The requests that wait for their grammars. Only the threads' reports come from elsewhere."""

    def __init__(self) -> None:
        self._blocked: dict[str, Request] = {}
        self._compiled: SimpleQueue[Request] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._blocked)

    def add(self, request: Request) -> None:
        """Set the request aside until its grammar is compiled, or has turned out to be wrong."""
        self._blocked[request.request_id] = request
        when_compiled(request, lambda: self._compiled.put(request))

    def take_compiled(self) -> list[Request]:
        """Return the requests whose grammars were compiled since the last call, each once, and forget them."""
        compiled = [self._compiled.get() for _ in range(self._compiled.qsize())]
        return [request for request in compiled if self.discard(request)]

    def discard(self, request: Request) -> bool:
        """Forget the request, if it is known; another one may have its id since. Return whether it was known."""
        if self._blocked.get(request.request_id) is not request:
            return False
        del self._blocked[request.request_id]
        return True
