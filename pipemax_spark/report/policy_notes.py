"""Report the scheduler and the layout of the engines, and why; each engine reports its choice once.

Each engine decides by itself, from the lengths that the job has sampled, because executors may differ from one another
and from the driver.
"""

from collections.abc import Mapping
from typing import Any

from pipemax_spark.report.collector import Collector
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.report.tracking import Tracker

_AUTO = "auto"
_LAYOUT = ("replicas", "tensor_parallel_size", "pipeline_parallel_size")


def wants_row_lengths(engine: Mapping[str, Any]) -> bool:
    """Tell whether simulations decide the policy or the layout, and the config does not say what rows to expect."""
    if engine.get("row_lengths") is not None or "endpoint" in engine:
        return False
    has_open_layout = all(engine.get(name) is None for name in _LAYOUT)
    return has_open_layout or engine.get("policy", _AUTO) == _AUTO


class PolicyNotes:
    """Prints and records each choice as soon as a server that has done rows of this job reports it."""

    def __init__(self, collector: Collector, terminal: Terminal, tracker: Tracker) -> None:
        self._collector = collector
        self._terminal = terminal
        self._tracker = tracker
        self.choices: list[dict[str, Any]] = []
        """The different choices, in the order in which they came: ``chosen``, ``reason``,
        ``predicted_tokens_per_s``, ``inputs``, ``layout``."""
        self.tunings: list[str] = []
        """What the tunings of engines came to, in the same order."""

    def look(self) -> None:
        for server in self._collector.servers():
            # Until the server has done rows of this job, its engine may be that of the job before.
            is_ours = self._collector.job_of(server).rows_done > 0
            if is_ours and server.policy and server.policy not in self.choices:
                self.choices.append(server.policy)
                chosen, reason = server.policy["chosen"], server.policy["reason"]
                self._terminal.say("Policy", f"{chosen}: {reason}")
                self._tracker.tag({"policy": chosen, "policy_reason": reason})
                if layout := server.policy.get("layout"):
                    self._terminal.say("Layout", layout)
                    self._tracker.tag({"layout": layout})
            if is_ours and server.tuning and server.tuning not in self.tunings:
                # A line that goes on takes the place of what was said of the same tuning before.
                self.tunings = [line for line in self.tunings if not server.tuning.startswith(line)]
                self.tunings.append(server.tuning)
                self._terminal.say("Tuned", server.tuning.removeprefix("Tuned: "))
                self._tracker.tag({"tuning": server.tuning})
