"""The messages between a server and its replicas: one JSON object on a line, over a pair of sockets."""

import base64
import json
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic_core import PydanticSerializationError

from pipemax.domain.step_records import StepLimits, TuningFacts
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """To the replica, before anything else."""

    number: int
    """The replica's, from 1."""
    config: dict[str, Any]
    """An ``EngineConfig`` of one engine, as plain values."""
    cores: tuple[int, ...]
    """The only cores that it may use; empty for any."""
    asks_whether_it_measures: bool = False
    """Say ``NothingToMeasure`` first if that is so: others wait for it."""
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """To the replica: take these rows."""

    number: int
    """Counts these messages from 1."""
    requests: tuple[GenerationRequest, ...]
    kind: Literal["submit"] = "submit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """To the replica: stop these rows."""

    request_ids: tuple[str, ...]
    kind: Literal["abort"] = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOpen:
    """To the replica: whether more rows may come soon."""

    is_open: bool
    kind: Literal["input"] = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimits:
    """To the replica: schedule by these limits."""

    limits: StepLimits
    kind: Literal["limits"] = "limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSteps:
    """To the replica: send the steps since the last ``Steps``."""

    kind: Literal["take steps"] = "take steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """To the replica: close the engine and end."""

    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingToMeasure:
    """From the replica, before its engine loads: it will not measure or check anything that the others need."""

    kind: Literal["nothing_to_measure"] = "nothing_to_measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """From the replica: the engine can take rows."""

    policy: dict[str, Any] = field(default_factory=dict)
    """Its ``PolicyChoice`` as plain values."""
    most_limits: StepLimits | None = None
    """What it was started for; None if its limits are fixed."""
    limits: StepLimits | None = None
    """With which it begins."""
    tuning: TuningFacts | None = None
    """None if its limits are fixed."""
    kind: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """From the replica: the engine could not start, and the process ends."""

    reason: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """From the replica, several times a second: its engine at one instant."""

    stats: EngineStats
    """Its figures are finite: JSON has no others."""
    credit_tokens: int
    heard: int
    """The number of the last ``Submit`` whose rows the credit counts."""
    kind: Literal["report"] = "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """From the replica: rows that have ended."""

    completions: tuple[Completion, ...]
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """From the replica, when it was asked: its steps since the last such message."""

    records: dict[str, Any]
    """``StepRecords`` as plain values."""
    kind: Literal["steps"] = "steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """From the replica: its engine is gone, and the process ends."""

    reason: str
    is_machine_fault: bool = False
    kind: Literal["died"] = "died"


ToReplica = Start | Submit | Abort | InputOpen | SetLimits | TakeSteps | Stop
FromReplica = NothingToMeasure | Started | Failed | Report | Ended | Steps | Died
Message = ToReplica | FromReplica

_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def line_of(message: Message) -> bytes:
    """Return a message as one line. Lone surrogates, which UTF-8 does not have, become question marks."""
    try:
        return _MESSAGES.dump_json(message) + b"\n"
    except PydanticSerializationError:
        # One odd row must not end a replica.
        text = json.dumps(asdict(message), ensure_ascii=False, default=_encoded)
        return text.encode(errors="replace") + b"\n"


def read_line(line: bytes) -> Message:
    """Return the message of a line. ``ValueError`` if there is none."""
    return _MESSAGES.validate_json(line)


def lines_of(connection: socket.socket) -> Iterator[bytes]:
    """Yield the lines that come until the other side ends. One that its death cut short is dropped."""
    with connection.makefile("rb") as stream:
        try:
            for line in stream:
                if line.endswith(b"\n"):
                    yield line
        except ConnectionResetError:
            return


def _encoded(content: bytes) -> str:
    """Return the bytes of an image or an embedding as pydantic writes them."""
    return base64.urlsafe_b64encode(content).decode()
