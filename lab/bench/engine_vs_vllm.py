"""Stock vLLM and PipeMax on this machine's CPU, with the same KV bytes on every pipeline stage.

    python lab/bench/engine_vs_vllm.py [--json FILE] [--pp 1 2 4] [--requests 64] [--gpu-blocks 60] [--rounds 1]
                                   [--loads uniform/plain sharegpt/plain uniform/templated] [--calibrate-s 60]
                                   [--systems vllm_128 vllm_256 vllm_512 pipemax pipemax_mixed auto] [--in-turns]

The model is random, with 93 million parameters in float32 (its output varies, so that tokens can be compared). There
are 60 KV blocks of 32 tokens per stage, as many stages as asked for, on whatever cores there are. Each configuration
runs one warm-up round, then the rounds that count, the systems one after the other: stock vLLM with steps of several
sizes, PipeMax with separated and with mixed batching, and ``policy: auto``, which is told the lengths of the load's
rows and may choose any of these, with steps of any size. With ``--in-turns`` all engines start first, and run one
round after the other in turns, so that what slows the machine for some minutes slows all of them; each engine takes
about a GB of memory for each stage. Ratios are to the fastest stock vLLM of the run. A CPU stands
in for the GPUs: ratios say something about the scheduling, tokens per second say nothing about GPUs.

PipeMax's engines measure their step times when they start (with an empty cache, so that they do), and mixed batching
chooses the size of its steps by them. Simulations with these times, over the very requests that run, predict each rate.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from lab.bench.near_ties import logit_gaps
from lab.paper.catalog import simulate
from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from pipemax.policy.compare import ChosenPolicy
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.systems.pipemax import PipeMaxSystem
from pipemax.sim.systems.pipemax_config import PipeMaxOptions, mixed_batching
from pipemax.sim.systems.scenario import measured_scenario
from pipemax.sim.workloads import Workload
from tests.parity.make_model import MEDIUM, make_model

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 512
_LETTERS = "abcdefghijklmnopqrstuvwxyz ,.;"
_TEMPLATE_CHARACTERS = 160
_COUNTS = (
    "decode_steps",
    "decoded_tokens",
    "prefill_steps",
    "empty_steps",
    "evictions",
    "prefetches",
    "prefetched_blocks",
    "found_blocks",
    "refused",
    "phase_switches",
    "preemptions",
    "schedule_s",
    "prefetch_stall_s",
)
"""The engine's metrics that only grow."""
STEP_TOKENS = 512
SYSTEMS: dict[str, dict[str, Any]] = {
    **{
        f"vllm_{size}": {"policy": "vllm", "max_num_batched_tokens": size, "max_num_seqs": min(64, size)}
        for size in (64, 128, 256, STEP_TOKENS)
    },
    "pipemax": {"policy": "pipemax", "batching": "separated"},
    "pipemax_mixed": {"policy": "pipemax", "batching": "mixed"},
    **{
        f"pipemax_mixed_{size}": {"policy": "pipemax", "batching": "mixed", "mixed_step_tokens": size}
        for size in (128, 256, STEP_TOKENS)
    },
    "auto": {"policy": "auto", "max_num_batched_tokens": None},
}
"""Fields of the engine config, by the system's name."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A set of requests."""

    lengths: str
    """``uniform`` or ``sharegpt``: lognormal lengths with ShareGPT's spread, scaled down."""
    prompts: str
    """``plain`` or ``templated``: every prompt begins with the same text."""


LOADS = {
    "uniform/plain": Load(lengths="uniform", prompts="plain"),
    "sharegpt/plain": Load(lengths="sharegpt", prompts="plain"),
    "uniform/templated": Load(lengths="uniform", prompts="templated"),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One policy under one load; rates count output tokens."""

    pp: int
    lengths: str
    prompts: str
    system: str
    chosen: str
    """The policy that ran: ``auto`` chooses it."""
    step_tokens: int | None
    """Maximum tokens of a step; None for PipeMax's separated batching."""
    tokens_per_s: float
    """By the median round."""
    seconds: list[float]
    """Seconds of each round."""
    ratio_to_best_vllm: float
    predicted_tokens_per_s: float
    """By the simulator, from the engine's own calibration."""
    tokens_identical: bool
    """Whether the tokens equal those of the first stock vLLM in the same run."""
    logit_gaps: dict[str, float | None]
    """For each row whose tokens differ, how far apart the two logits are where they first do; None if one answer merely
    ends before the other."""
    metrics: dict[str, float]
    """The engine's own counts, over warm-up and rounds."""


def make_requests(load: Load, count: int) -> list[GenerationRequest]:
    rng = Random(0)
    template = _text(rng, _TEMPLATE_CHARACTERS) if load.prompts == "templated" else ""
    requests = []
    for index in range(count):
        prompt_tokens, output_tokens = _lengths(rng, load.lengths)
        sampling = Sampling(max_tokens=output_tokens)
        prompt = template + _text(rng, prompt_tokens)
        requests.append(GenerationRequest(request_id=str(index), prompt=prompt, sampling=sampling))
    return requests


def _lengths(rng: Random, lengths: str) -> tuple[int, int]:
    """Draw the (prompt, output) tokens of a request."""
    match lengths:
        case "uniform":
            return rng.randint(20, 150), 64
        case "sharegpt":
            prompt, output = rng.lognormvariate(4.0, 1.0), rng.lognormvariate(4.0, 0.8)
            return min(240, max(4, round(prompt))), min(200, max(4, round(output)))
        case _:
            raise ValueError(lengths)


def _text(rng: Random, length: int) -> str:
    return "".join(rng.choice(_LETTERS) for _ in range(length))


def row_lengths(load: Load, count: int) -> dict[str, Any]:
    """Return the lengths of a load's rows, as an engine config tells them; a letter is a token."""
    requests = make_requests(load, count)
    outputs = [request.sampling.max_tokens for request in requests]
    return {
        "prompt_tokens": [len(request.prompt or "") for request in requests],
        "shared_prefix_tokens": _TEMPLATE_CHARACTERS if load.prompts == "templated" else 0,
        "max_tokens": max(outputs),
        "mean_output_tokens": sum(outputs) / count,
        "rows": count,
    }


def engine_config(
    model: str,
    system: str,
    pp: int,
    gpu_blocks: int,
    calibrate_s: float = 0.0,
    lengths: dict[str, Any] | None = None,
) -> EngineConfig:
    return EngineConfig.parse(
        {
            "model": model,
            "pipeline_parallel_size": pp,
            "dtype": "float32",
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 64,
            "max_num_batched_tokens": STEP_TOKENS,
            "block_size": BLOCK_TOKENS,
            "cpu_kv_gib": 0.5,
            "host_kv_gib": 1.5 / pp,
            "chat": "never",
            "calibrate_at_start_s": calibrate_s,
            "vllm": {"num_gpu_blocks_override": gpu_blocks},
            "row_lengths": lengths,
            **SYSTEMS[system],
        }
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    load: Load
    chosen: ChosenPolicy
    step_tokens: int | None
    seconds: list[float]
    tokens: dict[str, tuple[int, ...]]
    prompt_tokens: dict[str, int]
    metrics: dict[str, float]
    engine: MeasuredEngine | None
    """What the engine measured of itself; None for stock vLLM."""

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens.values())) / median(self.seconds)


class Running:
    """An engine with a load, of which each round is timed."""

    def __init__(self, engine: OfflineEngine, load: Load, step_tokens: int | None, count: int) -> None:
        self._engine = engine
        self._load = load
        self._step_tokens = step_tokens
        self._requests = make_requests(load, count)
        self._before = engine.stats().metrics
        self._seconds: list[float] = []

    def run_round(self) -> None:
        begin_s = time.perf_counter()
        self._completions = list(self._engine.generate(self._requests))
        self._seconds.append(time.perf_counter() - begin_s)

    def measured(self) -> Measured:
        """Return what was measured; the first round was to warm up."""
        after = self._engine.stats().metrics
        metrics = {name: after[name] - self._before.get(name, 0.0) for name in _COUNTS if name in after}
        if metrics.get("decode_steps"):
            metrics["mean_decode_batch"] = metrics["decoded_tokens"] / metrics["decode_steps"]
        for name in ("steps_within_5_percent", "worst_step_error", "mean_step_error"):
            if name in after:
                metrics[name] = after[name]
        return Measured(
            load=self._load,
            chosen=self._engine.policy_choice.chosen,
            step_tokens=self._step_tokens,
            seconds=self._seconds[1:],
            tokens={done.request_id: done.token_ids for done in self._completions},
            prompt_tokens={done.request_id: done.prompt_tokens for done in self._completions},
            metrics=metrics,
            engine=self._engine.measured,
        )


def predict(engine: MeasuredEngine, measured: Measured) -> float:
    """Return the simulated tokens/s, prompts included, of the same requests, in the order in which they were sent."""
    ids = sorted(measured.tokens, key=int)
    workload = Workload(
        name=measured.load.lengths,
        prompt_tokens=np.array([measured.prompt_tokens[name] for name in ids]),
        output_tokens=np.array([len(measured.tokens[name]) for name in ids]),
        shared_prefix_tokens=_TEMPLATE_CHARACTERS if measured.load.prompts == "templated" else 0,
    )
    step_tokens = measured.step_tokens
    if measured.chosen is ChosenPolicy.VLLM:
        assert step_tokens is not None
        scenario = measured_scenario(engine.with_steps_of(step_tokens), workload)
        return simulate("vllm_032_pp", scenario).total_tokens_per_s
    controller = {} if step_tokens is None else mixed_batching(step_tokens)
    system = PipeMaxSystem(measured_scenario(engine, workload), PipeMaxOptions(controller=controller))
    return system.simulate().total_tokens_per_s


def step_tokens_of(engine: OfflineEngine, config: EngineConfig) -> int | None:
    """Return the maximum tokens of the engine's steps; None with separated batching."""
    choice = engine.policy_choice
    if choice.chosen is ChosenPolicy.PIPEMAX:
        tokens = choice.settings.get("mixed_step_tokens")
        return None if tokens is None else int(tokens)
    return config.max_num_batched_tokens or int(choice.inputs["stock_chunk_tokens"])


def measure_systems(model: str, pp: int, arguments: argparse.Namespace) -> dict[str, list[Measured]]:
    """Measure every system under every load, the systems one after the other, or their rounds in turns."""
    found: dict[str, list[Measured]] = {system: [] for system in arguments.systems}
    at_once = [arguments.systems] if arguments.in_turns else [[system] for system in arguments.systems]
    for load in (LOADS[name] for name in arguments.loads):
        for systems in at_once:
            with ExitStack() as engines:
                running = {
                    system: engines.enter_context(started(model, system, pp, load, arguments))
                    for system in systems
                }
                for _ in range(1 + arguments.rounds):
                    for one in running.values():
                        one.run_round()
                for system, one in running.items():
                    found[system].append(one.measured())
    return found


@contextmanager
def started(model: str, system: str, pp: int, load: Load, arguments: argparse.Namespace) -> Iterator[Running]:
    """Start an engine; ``auto`` is told the load's lengths."""
    lengths = row_lengths(load, arguments.requests) if system == "auto" else None
    config = engine_config(model, system, pp, arguments.gpu_blocks, arguments.calibrate_s, lengths=lengths)
    with OfflineEngine(config) as engine:
        print(f"{system}: {engine.policy_choice.reason}", flush=True)
        yield Running(engine, load, step_tokens_of(engine, config), arguments.requests)


def compare(model: str, pp: int, arguments: argparse.Namespace) -> Iterator[Result]:
    """Measure all systems under every load."""
    measured = measure_systems(model, pp, arguments)
    calibrated = next(
        (one.engine for outcomes in measured.values() for one in outcomes if one.engine is not None), None
    )
    assert calibrated is not None, "no engine was calibrated: name a system of PipeMax's"
    stock = [outcomes for system, outcomes in measured.items() if system.startswith("vllm")]
    for system, outcomes in measured.items():
        for index, outcome in enumerate(outcomes):
            best = max(one[index].tokens_per_s for one in stock)
            first = stock[0][index]
            output_tokens = sum(map(len, outcome.tokens.values()))
            prompts = {
                each.request_id: each.prompt or "" for each in make_requests(outcome.load, arguments.requests)
            }
            gaps = logit_gaps(model, prompts, outcome.tokens, first.tokens)
            output_share = output_tokens / (output_tokens + sum(outcome.prompt_tokens.values()))
            predicted = predict(calibrated, outcome)
            yield Result(
                pp=pp,
                lengths=outcome.load.lengths,
                prompts=outcome.load.prompts,
                system=system,
                chosen=outcome.chosen.value,
                step_tokens=outcome.step_tokens,
                tokens_per_s=round(outcome.tokens_per_s, 1),
                seconds=[round(seconds, 2) for seconds in outcome.seconds],
                ratio_to_best_vllm=round(outcome.tokens_per_s / best, 3),
                predicted_tokens_per_s=round(output_share * predicted, 1),
                tokens_identical=outcome.tokens == first.tokens,
                logit_gaps={name: None if gap is None else round(gap, 6) for name, gap in gaps.items()},
                metrics={name: round(value, 4) for name, value in outcome.metrics.items()},
            )


def _describe(gaps: Collection[float | None]) -> str:
    if not gaps:
        return ""
    known = [gap for gap in gaps if gap is not None]
    apart = f", logits at most {max(known):.6f} apart" if known else ""
    shorter = f", {len(gaps) - len(known)} of them only shorter or longer" if len(known) < len(gaps) else ""
    return f" ({len(gaps)} rows{apart}{shorter})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--pp", type=int, nargs="+", default=[1, 2, 4], help="pipeline stages")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--gpu-blocks", type=int, default=60, help=f"KV blocks of {BLOCK_TOKENS} tokens a stage"
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds that count, after one to warm up")
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=["vllm_128", "vllm_256", "vllm_512", "pipemax", "pipemax_mixed", "auto"],
    )
    parser.add_argument("--in-turns", action="store_true", help="run the systems' rounds in turns, see above")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument(
        "--calibrate-s", type=float, default=60.0, help="measure step times for so long, after loading"
    )
    arguments = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        make_model(model, MEDIUM)
        os.environ["XDG_CACHE_HOME"] = directory
        for pp in arguments.pp:
            for result in compare(str(model), pp, arguments):
                results.append(result)
                batch = result.metrics.get("mean_decode_batch")
                of_batch = "" if batch is None else f"  mean batch {batch:.1f}"
                of_gaps = _describe(result.logit_gaps.values())
                low, high = min(result.seconds), max(result.seconds)
                print(
                    f"pp={pp} {result.lengths:8} {result.prompts:9} {result.system:13} {result.tokens_per_s:7.1f} tok/s"
                    f"  ×{result.ratio_to_best_vllm:.2f} ({low:.1f} to {high:.1f} s)  {result.chosen}, steps of "
                    f"{result.step_tokens}"
                    f"  predicted {result.predicted_tokens_per_s:7.1f} tok/s"
                    f"  identical={result.tokens_identical}{of_gaps}{of_batch}",
                    flush=True,
                )
            if arguments.json:  # after each number of stages: a run takes half an hour
                arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
