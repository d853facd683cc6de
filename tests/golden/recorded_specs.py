"""Jobs of every kind, and how a job's spec is found from its options.

Tables hold the hashes: a job whose hash changes is refused on its own table, or annotates every row again.
"""

import json
from pathlib import Path
from typing import Any

from pipemax.config import EngineConfig
from pipemax.wire import PreflightReply
from pipemax_spark.job.arguments import job_options
from pipemax_spark.request.spec import AnnotationSpec

RECORDED = Path(__file__).parent / "specs.json"


def recorded_jobs() -> dict[str, dict[str, Any]]:
    """Return by the job's name: its ``options`` as ``annotate_table`` takes them, the ``hash`` and the ``values``."""
    jobs: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return jobs


def spec_of(options: dict[str, Any]) -> AnnotationSpec:
    """Return the spec that a job of these options has, with a model whose files are known."""
    job = job_options({"input": "in", "output": "out", **options}, log_dir=Path("logs"))
    engine = EngineConfig.parse(dict(job.engine))
    reply = PreflightReply(
        model=engine.model, model_fingerprint="sha256:0123", engine=engine.model_dump(mode="json")
    )
    return AnnotationSpec.of(
        reply, source=job.source, generation=job.generation, questions=job.ask, time_zone=None
    )
