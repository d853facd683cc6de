"""Ray Data LLM on one CPU engine.

Ray starts an engine for each dataset that is run and ends it afterwards, so each run has a start of its own and no
warm-up: its seconds are from the first row that reached the engine to the last file on disk.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from lab.bench.peers.load import Load
from lab.bench.peers.recorder import Recorder, tokens_by_id


def ray_data_llm(load: Load, recorder: Recorder) -> None:
    """Run Ray Data LLM with its defaults, except for three settings.

    The batch size is that of all systems, a CPU replaces the GPU, and stages that this load does not need are left out
    (prompts are plain text, and vLLM itself tokenizes in the process that is there anyway).
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    begin_s = time.time()
    import ray

    # Keep this short: the paths of Ray's sockets must stay under 108 bytes.
    ray.init(
        num_cpus=len(load.cores),
        include_dashboard=False,
        object_store_memory=1 << 29,
        _temp_dir=str(Path(load.directory) / "ray"),
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        for _ in range(load.repeats):
            begin_s = _run(load, recorder, begin_s)
    finally:
        ray.shutdown()


def _run(load: Load, recorder: Recorder, begin_s: float) -> float:
    """Run one dataset; return when it ended, in seconds since the epoch."""
    import ray

    output = Path(tempfile.mkdtemp(prefix="ray-out-", dir=load.directory))
    table = ray.data.read_parquet(load.table).repartition(-(-load.rows // load.batch_rows))
    _processor(load)(table).write_parquet(str(output))
    ended_s = time.time()
    answers = pq.read_table(output)
    first_row_s = min(answers["arrival_s"].to_pylist())
    last_file_s = max(file.stat().st_mtime for file in output.iterdir())
    recorder.started(first_row_s - begin_s)
    recorder.ran(last_file_s - first_row_s, tokens_by_id(answers))
    return ended_s


def _processor(load: Load) -> Any:
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    arguments = load.vllm_arguments()
    config = vLLMEngineProcessorConfig(
        model_source=arguments.pop("model"),
        engine_kwargs=arguments,
        batch_size=load.batch_rows,
        concurrency=1,
        placement_group_config={"bundle_per_worker": {"CPU": 1}},
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
    )
    return build_processor(config, preprocess=_request, postprocess=_answer)


def _request(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "prompt": row["prompt"],
        "sampling_params": {"temperature": 0.0, "max_tokens": row["max_tokens"]},
    }


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": row["id"],
        "text": row["generated_text"],
        "tokens": row["num_generated_tokens"],
        "arrival_s": row["metrics"]["arrival_time"],
    }
