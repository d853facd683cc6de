"""Settings of a virtual node from the launcher to its executor, through vLLM's ``additional_config``.

The executor may live in another process, so they cross as plain values.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

from lab.virtual_node.host_clock import HostClock, SkippingClock, WallClock
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.presets import build_spec

_KEY = "pipemax_rehearsal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSettings:
    """How the host's time counts: by the wall clock with ``stretch``, or without waits if ``host_factor`` is set."""

    stretch: float = 1.0
    """Seconds of the wall clock for a second of the node."""
    host_factor: float | None = None
    """Seconds of the node for a second of the host's CPU time, 0 for a host that takes none."""
    never_stops: bool = False
    """By the wall clock: count what the virtual node itself takes, too."""

    def start(self) -> HostClock:
        if self.host_factor is None:
            return WallClock(self.stretch, never_stops=self.never_stops)
        return SkippingClock(self.host_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSettings:
    """The virtual node under an engine."""

    node: NodeSpec
    model: ModelSpec
    clock: ClockSettings
    checks_kv: bool
    """Check that steps and copies find the KV that they should."""

    def to_additional_config(self) -> dict[str, Any]:
        return {_KEY: asdict(self)}

    @classmethod
    def from_additional_config(cls, additional_config: dict[str, Any]) -> Self:
        values = additional_config[_KEY]
        return cls(
            node=build_spec(NodeSpec, values["node"], "virtual node"),
            model=build_spec(ModelSpec, values["model"], "virtual model"),
            clock=ClockSettings(**values["clock"]),
            checks_kv=values["checks_kv"],
        )
