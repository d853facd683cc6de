"""Record a controller's decisions as JSON lines: its config, each batch of events, each plan with inputs and reason.

Replaying a trace gives the same plans (``replay``), so a decision seen in production can be studied, and golden traces
guard the policy in tests. ``explain`` says in words why each step did what it did.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from pipemax.control.controller import Controller
from pipemax.control.controller_config import ControllerConfig
from pipemax.domain.events import Event
from pipemax.domain.plain_values import decode, encode
from pipemax.domain.plan import Decision, Phase, PhaseReason, PrefetchMode, StepPlan

TRACE_VERSION = 1
_ABLATIONS = {"victim_policy": "longest_first", "static_prefetch_fraction": None}
"""Fields of the config that a trace has for ablations, which are no part of it any more; these values mean none."""


class TraceWriter:
    """Writes one controller's trace. The controller that is given it calls ``events`` and ``plan``."""

    def __init__(self, path: Path, config: ControllerConfig) -> None:
        self._file = path.open("w", encoding="utf-8")
        no_ablation = {name: value for name, value in _ABLATIONS.items() if value is not None}
        self._write({"version": TRACE_VERSION, "config": encode(config) | no_ablation})

    def events(self, events: Sequence[Event]) -> None:
        self._write({"events": [{"type": type(event).__name__, **encode(event)} for event in events]})

    def plan(self, now_s: float, plan: StepPlan) -> None:
        self._write({"now_s": now_s, "plan": encode(plan)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def replay(path: Path) -> Iterator[tuple[StepPlan, StepPlan]]:
    """Drive a fresh controller with a trace's events; yield each plan as recorded and as it is made now."""
    config, lines = _open(path)
    controller = Controller(config)
    for line in lines:
        if "plan" in line:
            yield decode(StepPlan, line["plan"]), controller.plan_step(line["now_s"])
        else:
            controller.apply(_decode_events(line["events"]))


def explain(path: Path) -> Iterator[str]:
    """Yield a line for each plan of a trace, and a line for the events before it."""
    config, lines = _open(path)
    yield (
        f"{config.num_batches} batches over {len(config.stages)} stages; {config.gpu_blocks} GPU blocks and "
        f"{config.host_blocks} host blocks of {config.block_tokens} tokens"
    )
    happened: Counter[str] = Counter()
    for line in lines:
        if "plan" in line:
            if happened:
                yield "    " + ", ".join(f"{count} × {name}" for name, count in happened.items())
                happened.clear()
            yield _explain_plan(line["now_s"], decode(StepPlan, line["plan"]))
        else:
            happened.update(event["type"] for event in line["events"])


def _open(path: Path) -> tuple[ControllerConfig, Iterator[dict[str, Any]]]:
    """Return a trace's config and its further lines. Raise ``ValueError`` if the file is no trace of this version."""

    def lines() -> Iterator[dict[str, Any]]:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                try:
                    yield json.loads(text)
                except ValueError as error:
                    raise ValueError(f"{path.name} is no trace: line {number}: {error}") from error

    rest = lines()
    head = next(rest, {})
    if not isinstance(head, dict) or head.get("version") != TRACE_VERSION:
        raise ValueError(f"{path.name} is no trace of version {TRACE_VERSION}")
    config = {**_ABLATIONS, **head["config"]}
    for name, value in _ABLATIONS.items():
        if config.pop(name) != value:
            raise ValueError(f"{path.name} is the trace of an ablation: its {name} is not {value}")
    return decode(ControllerConfig, config), rest


# In words.

_REASONS = {
    PhaseReason.START: "no request waits",
    PhaseReason.FILL_HOST: "the host pool is below its high watermark and requests wait",
    PhaseReason.FINISH_PROMPTS: "nothing more is admitted, but prompts that were begun are completed",
    PhaseReason.AWAIT_INPUT: "the host pool has room, and more input was announced",
    PhaseReason.HOST_FULL: "the next request in line would pass the host pool's high watermark",
    PhaseReason.INPUT_USED_UP: "nothing waits to be prefilled",
    PhaseReason.LIVE_KV_LOW: "live KV fell under the low watermark, and requests wait",
    PhaseReason.REST_FITS: "no more input will come, and all that waits fits into the host pool",
    PhaseReason.NOTHING_DECODABLE: "no request has a complete prompt",
    PhaseReason.KEEP_DECODING: "live KV is above the low watermark, or little or nothing waits",
    PhaseReason.ENOUGH_PARKED: "live KV is above its watermark, so no further prompt is begun",
}

_MODES = {
    PrefetchMode.WARM_UP: "short requests first, as the budget still grows",
    PrefetchMode.STEADY: "long requests first, then exchanged to close the gap",
    PrefetchMode.FORCED: "nothing is resident, so copies cannot be hidden",
    PrefetchMode.STATIC: "a fixed share of the GPU pool, oldest first",
    PrefetchMode.NONE: "",
}


def _explain_plan(now_s: float, plan: StepPlan) -> str:
    why = plan.decision
    parts = [f"step {plan.step_id} at {now_s:.3f} s: {plan.phase}, since {_REASONS[why.reason]}"]
    parts.append(_explain_run(plan, why))
    if plan.prefetch:
        parts.append(_explain_prefetch(plan, why))
    if plan.evict:
        parts.append(f"evicts {_named(plan.evict)} for room")
    if plan.overwrite:
        parts.append(f"overwrites {_named(plan.overwrite)} behind the computation")
    if plan.recompute:
        parts.append(f"the host pool overflows: recomputes {_named(plan.recompute)}")
    parts.append(
        f"leaves {why.free_gpu_blocks} GPU and {why.free_host_blocks} host blocks free, {why.num_resident} "
        f"requests on the GPU, {why.num_parked} parked, {why.num_waiting} waiting"
    )
    return "; ".join(parts)


def _explain_run(plan: StepPlan, why: Decision) -> str:
    if plan.wait_until_s is not None:
        return f"waits for input until {plan.wait_until_s:.3f} s"
    if not plan.run:
        return "runs nothing" if plan.prefetch or plan.recompute else "waits for steps in flight"
    predicted = f"predicted {why.predicted_step_s * 1e3:.2f} ms"
    if plan.phase is Phase.PREFILL:
        return f"prefills {sum(plan.run_tokens)} tokens of {_named(plan.run)}, {predicted}"
    num_decodes = len(plan.run) if plan.num_decodes is None else plan.num_decodes
    chunks = plan.run[num_decodes:]
    prompts = f" and {sum(plan.run_tokens[num_decodes:])} prompt tokens of {_named(chunks)}" if chunks else ""
    return (
        f"iteration {why.iteration} runs D_{why.executing_batch}: {num_decodes} requests, "
        f"{why.run_kv_tokens} KV tokens{prompts}, {predicted}"
    )


def _explain_prefetch(plan: StepPlan, why: Decision) -> str:
    target = "" if why.next_batch is None else f" into D_{why.next_batch}"
    names = _named([item.request_id for item in plan.prefetch])
    text = f"prefetches {names}{target}, {why.prefetched_blocks} blocks"
    if why.budget_blocks:
        text += f" of a budget of {why.budget_blocks}, that batch being {why.gap_s * 1e3:.2f} ms short"
    if _MODES[why.prefetch_mode]:
        text += f" ({_MODES[why.prefetch_mode]})"
    in_parts = [item.request_id for item in plan.prefetch if not (item.is_first and item.is_last)]
    return text + (f"; {_named(in_parts)} in parts, being longer than the budget" if in_parts else "")


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids) if len(ids) <= 3 else f"{len(ids)} requests"


# Events.

_EVENTS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Event)}


def _decode_events(events: Iterable[dict[str, Any]]) -> list[Event]:
    return [
        decode(_EVENTS[event["type"]], {name: item for name, item in event.items() if name != "type"})
        for event in events
    ]
