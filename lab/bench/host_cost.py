"""Measure what the host costs for each step: scheduler, connector and messages, with very many live requests.

    python -m lab.bench.host_cost [--live 20000,100000] [--systems vllm_pp,pipemax,pipemax_mixed] [--json FILE]

vLLM's engine core with its own scheduler or PipeMax's runs over a virtual node (``lab/virtual_node/README.md``):
LLaMA-2-70B on 8 × RTX 5090, eight stages, ShareGPT lengths, all N requests added before the first step. Under PipeMax
the host's memory is made large enough for all of them, unless ``--host-memory GB`` says how large it is. ``begun`` is
how many requests had KV when the figures were taken, ``waiting`` how many had none: stock vLLM begins as many as
the GPUs hold, and mixed batching stops beginning prompts once enough wait on the host.

For each kind of step (``prompts``: no decodes, ``decode``: only decodes, ``mixed``), the last ``--steps`` steps, in
milliseconds of CPU time of the thread, median and 95th percentile, and the median bytes of the messages sent (once for
all workers) and replied (of all workers):

    schedule   the scheduler's schedule()
    update     the scheduler's update_from_output()
    send       vLLM's MessageQueue pickles the step's two messages, with our connector's metadata, for all workers
    receive    the same queues unpickle the workers' replies: of all stages under a KV connector, as vLLM does it
    core       the four together: what one step costs the core's process
    take_in    one worker unpickles the step's two messages; its 95th percentile has Python's collections of the
               core's own objects in it, which a worker's process does not have
    reply      one worker pickles its reply; the last stage's, which has the tokens
    connector  PipeMax's connector on one stage: the mean of the stages. What CUDA's calls take is not in it

The core's four count in the node's time. ``host_bubble`` is the share of the time of the last ``--steps`` decoding
steps in which the first stage had no step because the core worked: the throughput that the host costs.
"""

import argparse
import gc
import json
import logging
import os
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore

from lab.bench.host_messages import NUM_STAGES, TIMER, Messages, TimedExecutor
from lab.paper.lengths import open_workload
from lab.virtual_node.launch import RehearsedEngine, rehearsed_core
from lab.virtual_node.run import add_requests
from lab.virtual_node.settings import ClockSettings
from pipemax.config import Policy
from pipemax.domain.plan import Batching
from pipemax.domain.specs import ModelSpec, NodeSpec, Parallelism
from pipemax.presets import load_model, load_node
from pipemax.sim.workloads import Workload

PARTS = ("schedule", "update", "send", "receive", "core", "take_in", "reply", "connector")
CORE_PARTS = ("schedule", "update", "send", "receive")
_WARM_UP_STEPS = {Policy.VLLM: 1500, Batching.SEPARATED: 200, Batching.MIXED: 10_000}
"""Decoding steps before those measured: mixed steps evict and prefetch only once enough requests have begun."""


@dataclass(slots=True)
class StepCost:
    """One step: seconds of CPU by part, and the bytes of its messages."""

    num_requests: int
    num_tokens: int
    kind: str
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent_bytes: int = 0
    """Of the messages to the workers, each counted once."""
    reply_bytes: int = 0
    """Of all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One scheduler to measure."""

    name: str
    policy: Policy
    chunk_tokens: int
    batching: Batching = Batching.SEPARATED


SYSTEMS = (
    System(name="vllm_pp", policy=Policy.VLLM, chunk_tokens=1024),
    System(name="pipemax", policy=Policy.PIPEMAX, chunk_tokens=1024),
    System(name="pipemax_mixed", policy=Policy.PIPEMAX, chunk_tokens=256, batching=Batching.MIXED),
)


def engine_of(system: System, node: NodeSpec, model: ModelSpec, workload: Workload) -> RehearsedEngine:
    controller: dict[str, Any] = {}
    if system.policy is Policy.PIPEMAX:
        controller["initial_output_tokens"] = workload.typical_output_tokens
    return RehearsedEngine(
        node=node,
        model=model,
        parallelism=Parallelism(pipeline=NUM_STAGES, tensor=1),
        policy=system.policy,
        chunk_tokens=system.chunk_tokens,
        max_model_len=int((workload.prompt_tokens + workload.output_tokens).max()) + 1,
        batching=system.batching,
        clock=ClockSettings(host_factor=1.0),
        checks_kv=False,
        controller=controller,
        executor=TimedExecutor,
    )


def with_memory_for(node: NodeSpec, model: ModelSpec, workload: Workload) -> NodeSpec:
    """Return the node with host memory for the KV of all requests below the high watermark."""
    needed = 1.3 * workload.total_tokens * model.kv_bytes_per_token / node.host_kv_fraction
    return replace(node, host_memory_bytes=max(node.host_memory_bytes, needed))


def measure(engine: RehearsedEngine, workload: Workload, num_steps: int) -> dict[str, Any]:
    """Run until enough decoding steps are measured; return the figures that the module's docstring names."""
    with rehearsed_core(engine) as core:
        executor = core.model_executor
        assert isinstance(executor, TimedExecutor), executor
        with executor.clock.paused():
            add_requests(core, workload, vocab_size=engine.model.vocab_size)
        # As vLLM's core does at its start, and PipeMax's engine: what is there is not garbage.
        gc.collect()
        gc.freeze()
        costs = _watched(core, executor.messages)
        warm_up = _WARM_UP_STEPS[Policy.VLLM if engine.policy is Policy.VLLM else engine.batching]
        num_decoding, window = 0, (0.0, 0.0)
        while num_decoding < warm_up + num_steps:
            num_before = len(costs)
            core.step_fn()
            num_decoding += sum(cost.kind != "prompts" for cost in costs[num_before:])
            if num_decoding == warm_up:
                window = (executor.clock.now_s(), executor.node.usage.host_bubble_s)
            if not core.scheduler.has_requests():
                raise ValueError(f"{len(workload)} requests are too few for {num_steps} steps")
        seconds = executor.clock.now_s() - window[0]
        begun, waiting = core.scheduler.get_request_counts()
        gc.unfreeze()
        return {
            "begun": begun,
            "waiting": waiting,
            "steps_until_then": len(costs),
            "step_ms": round(1e3 * seconds / num_steps, 3),
            "host_bubble": round((executor.node.usage.host_bubble_s - window[1]) / seconds, 5),
            "by_kind": _by_kind(costs, num_steps),
        }


def _watched(core: EngineCore, messages: Messages) -> list[StepCost]:
    """Have the scheduler and the queues timed from now on; return the list to which each step is added."""
    costs: list[StepCost] = []
    scheduler = core.scheduler
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def timed_schedule(*args: Any) -> SchedulerOutput:
        if costs:  # what was sent, taken in and replied since then belongs to the step scheduled last
            for name, seconds in TIMER.take().items():
                costs[-1].seconds[name] += seconds
            costs[-1].sent_bytes, costs[-1].reply_bytes = messages.sent_bytes, messages.reply_bytes
            messages.sent_bytes = messages.reply_bytes = 0
        with TIMER.part("schedule"):
            output = schedule(*args)
        kind, num_decodes = _kind(output)
        costs.append(
            StepCost(num_requests=num_decodes, num_tokens=output.total_num_scheduled_tokens, kind=kind)
        )
        return output

    def timed_update(*args: Any) -> Any:
        with TIMER.part("update"):
            return update(*args)

    TIMER.take()
    scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update  # type: ignore[method-assign]
    return costs


def _kind(output: SchedulerOutput) -> tuple[str, int]:
    """Return which kind of step it is, and how many requests it decodes."""
    cached = output.scheduled_cached_reqs
    num_outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
    for new in output.scheduled_new_reqs:  # also those that are sent again, with their outputs so far
        num_outputs[new.req_id] = len(new.prefill_token_ids or ()) - len(new.prompt_token_ids or ())
    decodes = sum(
        num_outputs[request] > 0 and tokens == 1 for request, tokens in output.num_scheduled_tokens.items()
    )
    if not output.num_scheduled_tokens:
        return "empty", 0
    if decodes == 0:
        return "prompts", 0
    return ("decode" if decodes == len(output.num_scheduled_tokens) else "mixed"), decodes


def _by_kind(costs: list[StepCost], num_steps: int) -> dict[str, Any]:
    found = {}
    for kind in ("prompts", "decode", "mixed"):
        chosen = [cost for cost in costs[:-1] if cost.kind == kind][-num_steps:]
        if len(chosen) < min(30, num_steps):
            continue
        rows: dict[str, Any] = {
            "steps": len(chosen),
            "mean_decodes": round(float(np.mean([cost.num_requests for cost in chosen])), 1),
            "mean_tokens": round(float(np.mean([cost.num_tokens for cost in chosen])), 1),
        }
        for name in ("sent_bytes", "reply_bytes"):
            rows[name] = round(float(np.median([getattr(cost, name) for cost in chosen])))
        for part in PARTS:
            values = [1e3 * _seconds(cost, part) for cost in chosen]
            rows[part] = [round(float(np.percentile(values, share)), 3) for share in (50, 95)]
        found[kind] = rows
    return found


def _seconds(cost: StepCost, part: str) -> float:
    if part == "core":
        return sum(cost.seconds[name] for name in CORE_PARTS)
    of_each = NUM_STAGES if part in ("take_in", "connector") else 1
    return cost.seconds[part] / of_each


def print_rows(entry: dict[str, Any]) -> None:
    print(
        f"{entry['system']}: {entry['live']:,} requests, {entry['begun']:,} begun and {entry['waiting']:,} waiting; "
        f"{entry['step_ms']} ms a step, host bubble {entry['host_bubble']:.2%}"
    )
    for kind, rows in entry["by_kind"].items():
        parts = ", ".join(f"{part} {rows[part][0]} ({rows[part][1]})" for part in PARTS)
        print(
            f"  {kind}, {rows['mean_decodes']} decodes, {rows['mean_tokens']} tokens: {parts}; "
            f"{rows['sent_bytes']:,} bytes sent, {rows['reply_bytes']:,} replied",
            flush=True,
        )


def decode_cost_us(entry: dict[str, Any]) -> float | None:
    """Return the core's CPU time for one decode, in steps of decodes if there were any, otherwise in mixed ones."""
    rows = entry["by_kind"].get("decode") or entry["by_kind"].get("mixed")
    return 1e3 * rows["core"][0] / rows["mean_decodes"] if rows else None


def differences(found: list[dict[str, Any]]) -> list[str]:
    """Return a line for each system that ran next to stock vLLM: what a decode costs, and how much on top of stock."""
    stock = {entry["live"]: decode_cost_us(entry) for entry in found if entry["system"] == SYSTEMS[0].name}
    lines = []
    for entry in found:
        own_us, stock_us = decode_cost_us(entry), stock.get(entry["live"])
        if entry["system"] != SYSTEMS[0].name and own_us is not None and stock_us is not None:
            lines.append(
                f"{entry['system']}, {entry['live']:,} requests: {own_us:.1f} µs a decode, of which stock vLLM's own "
                f"loop takes {stock_us:.1f} and PipeMax {own_us - stock_us:.1f}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--live", default="20000,100000", help="requests, separated by commas")
    parser.add_argument("--systems", default=",".join(one.name for one in SYSTEMS))
    parser.add_argument("--steps", type=int, default=300, help="steps measured of each kind (default 300)")
    parser.add_argument("--host-memory", type=float, help="GB of the node (default: enough for all requests)")
    parser.add_argument("--json", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    node, model = load_node("rtx5090x8"), load_model("llama2-70b")
    if arguments.host_memory:
        node = replace(node, host_memory_bytes=1e9 * arguments.host_memory)
    wanted = arguments.systems.split(",")
    found = []
    for live in (int(number) for number in arguments.live.split(",")):
        workload = open_workload("sharegpt", live)
        for system in (one for one in SYSTEMS if one.name in wanted):
            own = node if arguments.host_memory else with_memory_for(node, model, workload)
            figures = measure(engine_of(system, own, model, workload), workload, arguments.steps)
            host_gb = round(own.host_memory_bytes / 1e9)
            entry = {"system": system.name, "live": live, "host_memory_gb": host_gb, **figures}
            found.append(entry)
            print_rows(entry)
    print("\n".join(differences(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main())
