"""Errors for failures while running. A caller's mistake is a ``ValueError`` instead."""


class PipeMaxError(Exception):
    """The root of every failure that PipeMax itself reports."""


class EngineStartError(PipeMaxError):
    """The engine could not start: the model does not load, or the memory does not suffice."""


class EngineDiedError(PipeMaxError):
    """The engine's process ended or its loop raised; everything in flight in it is lost."""

    def __init__(
        self,
        reason: str,
        *,
        suspects: frozenset[str] | None = None,
        is_machine_fault: bool = False,
        ends_run: bool = False,
    ) -> None:
        """Say the reason in words. ``suspects`` are the requests of which one may be it; None for all in flight.

        No request is suspect of a fault of the machine, such as one of its GPUs, nor of what ``ends_run``, because
        another start would meet it again: an endpoint that refuses the key, say.
        """
        super().__init__(reason)
        self.suspects = frozenset[str]() if is_machine_fault or ends_run else suspects
        self.is_machine_fault = is_machine_fault
        self.ends_run = ends_run


class PoolExhaustedError(PipeMaxError):
    """A reservation asked for more blocks than a pool has free; nothing was changed."""


class TransferError(PipeMaxError):
    """A copy between host and GPU failed; raised again where its result is polled."""
