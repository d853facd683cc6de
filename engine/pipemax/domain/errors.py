"""Errors for failures while running. A caller's mistake is a ``ValueError`` instead."""


class PipeMaxError(Exception):
    """The root of every failure that PipeMax itself reports."""


class EngineStartError(PipeMaxError):
    """The engine could not start: the model does not load, or the memory does not suffice."""


class EngineDiedError(PipeMaxError):
    """The engine's process ended or its loop raised; everything in flight in it is lost."""

    def __init__(self, reason: str, *, suspects: frozenset[str] | None = None) -> None:
        """Say the reason in words. ``suspects`` are the requests of which one may be it; None for all in flight."""
        super().__init__(reason)
        self.suspects = suspects


class PoolExhaustedError(PipeMaxError):
    """A reservation asked for more blocks than a pool has free; nothing was changed."""


class TransferError(PipeMaxError):
    """A copy between host and GPU failed; raised again where its result is polled."""
