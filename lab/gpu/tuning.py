"""Tune stock vLLM on one GPU while it answers, and compare the result with a grid of fixed limits.

    python -m lab.gpu.tuning --out DIR [--seconds S]

The engine holds Llama-3.1-8B with dummy weights and is started by formula for rows of ShareGPT's lengths, which come
without end. First each setting of the grid runs for some seconds, the default between them; the work of a setting's
steps is weighed by the costs that are fitted to all of them. Then the engine tunes itself, by rules with shorter blocks
than a job has.
"""

import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from lab.gpu.criteria import Criterion, print_verdict
from lab.gpu.drive import Prompts, exact_lengths
from lab.gpu.models import KERNELS, MAX_MODEL_LEN, ONE_GPU, make_stage_model
from lab.gpu.side_by_side import GPU_MODULES, Job, begin_run, ended_by_sigterm, preload, run_together
from lab.gpu.stage_of_eight import row_lengths
from lab.gpu.tables import print_table
from pipemax.config import EngineConfig, RowLengths
from pipemax.domain.envelope import graph_sizes
from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.rules import TuningRules
from pipemax.tuning.step_fit import WorkCosts, fit_steps

WASHOUT_S, MEASURED_S = 5.0, 8.0
RULES = TuningRules(sweep_setting_s=1.2, block_s=7.0, residences=1.0, fewest_residences=1.0, max_s=110.0)
_SENT_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    step_tokens: int
    running_rows: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    mean_rows: float
    step_ms: float
    preempted: int
    work_of_default: float
    """Work per second, as a ratio to the default's runs before and after."""


def grid(default: StepLimits, ceiling: StepLimits) -> list[StepLimits]:
    """Return the settings in the order in which they run; the default comes between the others."""
    others = [
        StepLimits(step_tokens=2048, running_rows=default.running_rows),
        StepLimits(step_tokens=4096, running_rows=ceiling.running_rows),
        StepLimits(step_tokens=default.step_tokens, running_rows=ceiling.running_rows),
        StepLimits(step_tokens=ceiling.step_tokens, running_rows=default.running_rows // 2),
    ]
    settings = [default]
    for index, limits in enumerate(dict.fromkeys(each.within(ceiling) for each in others if each != default)):
        settings += [limits, default] if index % 2 else [limits]
    return settings if settings[-1] == default else [*settings, default]


class EndlessRows:
    """Implements what a tuning asks of a job's streams."""

    def jobs(self) -> frozenset[str]:
        return frozenset({"job"})

    def share_left(self) -> int:
        return 1_000_000

    def traits(self) -> frozenset[str]:
        return frozenset()


def config(model: Path, lengths: Sequence[tuple[int, int]]) -> EngineConfig:
    sample = RowLengths(
        prompt_tokens=tuple(prompt for prompt, _ in lengths[:500]),
        max_tokens=1024,
        mean_output_tokens=statistics.mean(output for _, output in lengths),
    )
    return EngineConfig.parse(
        {
            "model": str(model),
            "policy": "vllm",
            "dtype": "bfloat16",
            "max_model_len": MAX_MODEL_LEN,
            "chat": "never",
            "pipeline_parallel_size": 1,
            "row_lengths": sample.model_dump(),
            "vllm": {
                "load_format": "dummy",
                "attention_backend": "FLASH_ATTN",
                "kernel_config": KERNELS,
                "compilation_config": {
                    "mode": 0,
                    "cudagraph_mode": "FULL_AND_PIECEWISE",
                    "cudagraph_capture_sizes": graph_sizes(1024)[::3],
                },
            },
        }
    )


def tune(model: Path, results: Path, limit_s: float) -> None:
    """Run grid and tuning, and write what came of them after each part."""
    begin_s = time.monotonic()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    from pipemax.api import OfflineEngine
    from pipemax.serve.flow.live_tuning import LiveTuning

    lengths = row_lengths()
    engine_config = config(model, lengths)
    with exact_lengths(), OfflineEngine(engine_config) as engine:
        started_s = time.monotonic() - begin_s
        limits, ceilings = engine.limits()[0], engine.most_limits()[0]
        facts = engine.tuning_facts()
        document: dict[str, Any] = {
            "start_s": round(started_s, 1),
            "default": asdict(limits),
            "ceiling": asdict(ceilings),
            "facts": None if facts is None else asdict(facts),
        }
        print(json.dumps(document), flush=True)
        feed = _Feed(engine, lengths)
        parts: list[tuple[StepLimits, StepRecords]] = []
        for setting in grid(limits, ceilings):
            engine.set_limits([setting])
            feed.records(WASHOUT_S)
            parts.append((setting, feed.records(MEASURED_S)))
        document["grid"] = [asdict(row) for row in _compare(parts, limits, lengths)]
        results.write_text(json.dumps(document) + "\n", encoding="utf-8")
        engine.set_limits([limits])
        tuning, tuned_s = LiveTuning(EndlessRows(), rules=RULES), time.monotonic()
        trace: list[dict[str, float]] = []
        while not tuning.note and time.monotonic() - begin_s < limit_s - 6:
            feed.run(0.2, tuning.learn)
            tuning.see(engine, engine_config)
            present = asdict(engine.limits()[0])
            if not trace or {key: trace[-1][key] for key in present} != present:
                trace.append({"at_s": round(time.monotonic() - tuned_s, 1), **present})
        document |= {"note": tuning.note, "trace": trace, "tuned": asdict(engine.limits()[0])}
        results.write_text(json.dumps(document) + "\n", encoding="utf-8")
        print(tuning.note, flush=True)


class _Feed:
    """Keeps an engine in rows."""

    def __init__(self, engine: Any, lengths: Sequence[tuple[int, int]]) -> None:
        self._engine = engine
        tokenizer = engine._engine._engine.renderer.tokenizer
        requests = Prompts(tokenizer).requests("r", lengths, seed=2)
        self._requests = self._endless(requests)
        self._most_rows = engine.most_limits()[0].running_rows

    def _endless(self, requests: Sequence[Any]) -> Iterator[Any]:
        for number, request in enumerate(cycle(requests)):
            yield replace(request, request_id=f"r{number}", prompt=f"{number} {request.prompt}")

    def records(self, seconds: float) -> StepRecords:
        """Return those of the steps in this time, but for the fraction of a second that they take to come."""
        parts, until_s = [], time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.run(0.25)
            parts += self._engine.take_step_records()
        return StepRecords.joined(parts)

    def run(self, seconds: float, learn: Callable[[Sequence[Any]], None] | None = None) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            stats = self._engine.stats()
            if stats.waiting_requests < self._most_rows // 2 + _SENT_AT_ONCE:
                self._engine.submit([next(self._requests) for _ in range(_SENT_AT_ONCE)])
            ended = self._engine.poll(0.02)
            if errors := [row.error.message for row in ended if row.error]:
                raise RuntimeError(errors[0])
            if learn is not None:
                learn(ended)


def _compare(
    parts: Sequence[tuple[StepLimits, StepRecords]],
    default: StepLimits,
    lengths: Sequence[tuple[int, int]],
) -> list[Setting]:
    prompts_per_output = sum(p for p, _ in lengths) / sum(o for _, o in lengths)
    fit = fit_steps(StepRecords.joined([steps for _, steps in parts]), prompts_per_output=prompts_per_output)
    assert fit is not None
    print(f"standard error of the fit: {fit.error:.2%}", flush=True)
    rates = [_work_per_s(steps, fit.costs) for _, steps in parts]
    at = [index for index, (limits, _) in enumerate(parts) if limits == default]
    rows = []
    for index, (limits, steps) in enumerate(parts):
        near = [
            rates[other] for other in (max(n for n in at if n <= index), min(n for n in at if n >= index))
        ]
        seconds = float(np.nansum(steps.seconds))
        rows.append(
            Setting(
                step_tokens=limits.step_tokens,
                running_rows=limits.running_rows,
                output_tokens_per_s=round(float(steps.decodes.sum()) / seconds, 1),
                prompt_tokens_per_s=round(float(steps.prompt_tokens.sum()) / seconds, 1),
                mean_rows=round(float(steps.decodes.mean()), 1),
                step_ms=round(1e3 * float(np.nanmean(steps.seconds)), 2),
                preempted=int(steps.preempted.sum()),
                work_of_default=round(rates[index] / math.sqrt(math.prod(near)), 4),
            )
        )
    return rows


def _work_per_s(steps: StepRecords, costs: WorkCosts) -> float:
    return costs.work_s(steps) / float(np.nansum(steps.seconds))


def judge(document: dict[str, Any]) -> list[Criterion]:
    """Judge what was tuned by the grid's best."""
    rows, note = document.get("grid", []), document.get("note", "")
    best = max(rows, key=lambda row: row["work_of_default"], default=None)
    found = "nothing" if best is None else f"{best['step_tokens']:,} tokens, {best['running_rows']:,} rows"
    return [
        Criterion(
            criterion="the grid was measured",
            figure=f"best: {found}"
            + ("" if best is None else f", {best['work_of_default']:.3f} of the default"),
            passed=best is not None,
        ),
        Criterion(criterion="the tuning ended", figure=note or "no", passed=bool(note)),
    ]


def main(arguments: Sequence[str]) -> int:
    limits = begin_run(__doc__, arguments)
    results = limits.out / "tuning.json"
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="pipemax-tuning-") as directory:
        model = Path(directory)
        make_stage_model(model, ONE_GPU)
        preload([*GPU_MODULES, "pipemax.vllm_ext.scheduler.tunable"])
        left_s = limits.deadline_s - time.monotonic()
        job = Job(name="tuning", work=lambda: tune(model, results, left_s))
        (end,) = run_together([job], limits.out, limit_s=left_s)
        print(f"tuning: {end.result} after {end.seconds:.0f} s", flush=True)
    document = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    if rows := document.get("grid"):
        print_table("limits", [Setting(**row) for row in rows])
    for change in document.get("trace", []):
        print(change)
    return 0 if print_verdict("tuning", judge(document)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
