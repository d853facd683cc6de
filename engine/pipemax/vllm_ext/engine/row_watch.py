"""The interface of what hears of an engine's rows, such as the later choice of a batching."""

from collections.abc import Sequence
from typing import Protocol

from pipemax.generation import Completion


class RowWatch(Protocol):
    """Hears of each row, on the engine's thread: no call may take time."""

    def sent(self, request_id: str) -> None: ...

    def ended(self, completions: Sequence[Completion]) -> None: ...

    def aborted(self, request_ids: Sequence[str]) -> None: ...

    def close(self) -> None: ...
