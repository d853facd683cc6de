"""Two replicas of a model on this machine's cores, against one engine and against one of two pipeline stages.

    python -m lab.bench.replicas [--rounds 5] [--rows 400] [--model demo] [--json FILE]

In each round every setup starts, does a fifth of the rows to warm up, and then all rows, which are timed; every other
round takes the setups in the opposite order. All run stock vLLM, in float32, on all cores that the process may use. So
the stages' processes share them, and each replica has its own. The answers of all setups are compared with those of
the first engine. It prints one line a round and setup, then the medians; ``--json`` writes one object for each setup:

    setup               ``one``, ``replicas`` or ``stages``
    seconds             of each round
    tokens_per_s        outputs, by the median round
    least_tokens_per_s, most_tokens_per_s
    ratio               of the medians, to ``one``
    differing_rows      rows with other tokens than the first engine's, in any round
    start_s             median seconds until the engine takes rows

The exit status is 1 if any row differs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipemax.api import GenerationRequest, OfflineEngine, Sampling
from pipemax.config import EngineConfig
from tests.engine.conftest import DEFAULTS
from tests.engine.test_offline_engine import demo_prompts
from tests.parity.make_model import MEDIUM, make_model

SETUPS: dict[str, dict[str, Any]] = {
    "one": {"replicas": 1, "pipeline_parallel_size": 1},
    "replicas": {"replicas": 2, "pipeline_parallel_size": 1},
    "stages": {"replicas": 1, "pipeline_parallel_size": 2},
}
WARM_UP_SHARE = 5

Tokens = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class Setup:
    """One setup over the rounds."""

    name: str
    seconds: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    differing: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One setup's figures; see the module's docstring."""

    setup: str
    rows: int
    output_tokens: int
    seconds: list[float]
    tokens_per_s: float
    least_tokens_per_s: float
    most_tokens_per_s: float
    ratio: float
    differing_rows: int
    start_s: float
    load_average: tuple[float, float, float]


def rows_of(count: int) -> list[GenerationRequest]:
    """Return rows with their own prompts, whose answers have 32 to 95 tokens."""
    return [
        GenerationRequest(
            request_id=str(index),
            prompt=f"{prompt}\nRow {index}",
            sampling=Sampling(max_tokens=32 + index % 64),
        )
        for index, prompt in enumerate(demo_prompts(count))
    ]


def run(setup: Setup, config: EngineConfig, rows: list[GenerationRequest]) -> Tokens:
    """Start the setup, time the rows, and return their tokens. Raise ``SystemExit`` if a row fails."""
    begin_s = time.perf_counter()
    with OfflineEngine(config) as engine:
        setup.start_s.append(time.perf_counter() - begin_s)
        list(engine.generate(rows[: max(1, len(rows) // WARM_UP_SHARE)]))
        begin_s = time.perf_counter()
        completions = list(engine.generate(rows))
        setup.seconds.append(time.perf_counter() - begin_s)
    if errors := [completion.error for completion in completions if completion.error]:
        raise SystemExit(f"{setup.name}: {len(errors)} rows failed, the first with {errors[0]}")
    return {completion.request_id: completion.token_ids for completion in completions}


def compare(model: dict[str, Any], rounds: int, rows: list[GenerationRequest]) -> list[Result]:
    """Run all rounds."""
    setups = [Setup(name) for name in SETUPS]
    expected: Tokens | None = None
    for number in range(rounds):
        for setup in setups if number % 2 == 0 else reversed(setups):
            tokens = run(setup, EngineConfig.parse({**model, **SETUPS[setup.name], "policy": "vllm"}), rows)
            expected = expected or tokens
            setup.differing |= {name for name, own in tokens.items() if own != expected[name]}
            print(f"round {number + 1} {setup.name:8} {setup.seconds[-1]:7.1f} s", flush=True)
    assert expected is not None
    output_tokens = sum(map(len, expected.values()))
    base_s = statistics.median(setups[0].seconds)
    return [
        Result(
            setup=setup.name,
            rows=len(rows),
            output_tokens=output_tokens,
            seconds=[round(seconds, 2) for seconds in setup.seconds],
            tokens_per_s=round(output_tokens / statistics.median(setup.seconds), 1),
            least_tokens_per_s=round(output_tokens / max(setup.seconds), 1),
            most_tokens_per_s=round(output_tokens / min(setup.seconds), 1),
            ratio=round(base_s / statistics.median(setup.seconds), 3),
            differing_rows=len(setup.differing),
            start_s=round(statistics.median(setup.start_s), 1),
            load_average=os.getloadavg(),
        )
        for setup in setups
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--model", choices=("demo", "medium"), default="demo", help="medium: 93M parameters")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.rows < 1:
        parser.error("--rounds and --rows must be at least 1")
    with tempfile.TemporaryDirectory() as directory:
        model = dict(DEFAULTS)
        if arguments.model == "medium":
            make_model(Path(directory), MEDIUM)
            model["model"] = directory
        results = compare(model, arguments.rounds, rows_of(arguments.rows))
    for one in results:
        print(
            f"{one.setup:8} {one.tokens_per_s:8.1f} tokens/s ({one.least_tokens_per_s:.1f} to "
            f"{one.most_tokens_per_s:.1f})  ×{one.ratio:.2f}  {one.differing_rows} rows differ  "
            f"starts in {one.start_s:.0f} s"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(one) for one in results], indent=1) + "\n", encoding="utf-8"
        )
    if any(one.differing_rows for one in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
