"""Writes a study as JSON objects and as a Chrome trace. ``lab.paper.plots`` draws its figures."""

import json
from pathlib import Path
from typing import Any

from lab.paper.study import Study
from pipemax.sim.links import Direction
from pipemax.sim.result import SimulationResult

_MICROSECONDS = 1e6


def json_objects(study: Study) -> list[dict[str, Any]]:
    """Return one object per system; rates are in tokens/s, fractions are of GPU time."""
    return [
        {
            "system": result.system,
            "node": study.node,
            "model": study.model,
            "kv_bytes_per_value": study.kv_bytes_per_value,
            "workload": study.workload,
            "requests": result.num_requests,
            "total_tokens_per_s": round(result.total_tokens_per_s, 1),
            "output_tokens_per_s": round(result.output_tokens_per_s, 1),
            "steady_tokens_per_s": round(result.steady_tokens_per_s, 1),
            "ratio_to_vllm_tp": round(study.ratio(result), 3),
            "mean_decode_batch": round(result.mean_decode_batch, 1),
            "bubble_fraction": round(result.bubble_fraction, 4),
            "decode_fraction": round(result.decode_fraction, 4),
            "all_reduce_fraction": round(result.all_reduce_fraction, 4),
            "h2d_fraction": round(result.h2d_fraction, 4),
            "recomputed_tokens": result.recomputed_tokens,
            "seconds": round(result.seconds, 2),
            "compute_bound_tokens_per_s": round(study.compute_bound_tokens_per_s, 1),
        }
        for result in study.results
    ]


def write_chrome_trace(result: SimulationResult, path: Path) -> None:
    """Write every step on every stage and every copy, for chrome://tracing or Perfetto.

    Raise ``ValueError`` if the run kept no spans.
    """
    if not result.recording.keep_spans:
        raise ValueError(f"the run of {result.system} kept no spans")
    events: list[dict[str, Any]] = []
    for span in result.recording.stage_spans:
        events.append(
            {
                "name": f"{span.kind} {span.step_number}",
                "cat": span.kind,
                "ph": "X",
                "pid": span.stage,
                "tid": 0,
                "ts": span.start_s * _MICROSECONDS,
                "dur": (span.end_s - span.start_s) * _MICROSECONDS,
                "args": {"batch": span.batch},
            }
        )
    for copy in result.recording.copy_spans:
        events.append(
            {
                "name": f"{copy.num_bytes / 1e6:.1f} MB",
                "cat": "copy",
                "ph": "X",
                "pid": copy.gpu,
                "tid": 1 + copy.direction,
                "ts": copy.start_s * _MICROSECONDS,
                "dur": (copy.end_s - copy.start_s) * _MICROSECONDS,
            }
        )
    gpus = sorted({event["pid"] for event in events})
    names = {0: "compute", 1 + Direction.HOST_TO_GPU: "host → GPU", 1 + Direction.GPU_TO_HOST: "GPU → host"}
    for gpu in gpus:
        events.append({"name": "process_name", "ph": "M", "pid": gpu, "args": {"name": f"GPU {gpu}"}})
        for tid, name in names.items():
            events.append({"name": "thread_name", "ph": "M", "pid": gpu, "tid": tid, "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
