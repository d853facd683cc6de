"""A user's own code without a library: an engine per Python worker, a batch of rows at a time. Runs in Spark's tasks.

This is a module of its own so that a worker which is used again finds the engine that its first task loaded.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from lab.bench.peers.load import Load

_engine: Any = None


def generate_with(
    load: Load, *, pins_cores: bool
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for ``mapInArrow``. If ``pins_cores``, each partition's worker takes the core of its number."""

    def generate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from vllm import SamplingParams

        llm = _load_engine(load, pins_cores)
        for batch in batches:
            for first in range(0, batch.num_rows, load.batch_rows):
                rows = batch.slice(first, load.batch_rows)
                sampling = [
                    SamplingParams(temperature=0.0, max_tokens=limit)
                    for limit in rows.column("max_tokens").to_pylist()
                ]
                outputs = llm.generate(rows.column("prompt").to_pylist(), sampling, use_tqdm=False)
                yield pa.RecordBatch.from_pydict(
                    {
                        "id": rows.column("id"),
                        "text": [output.outputs[0].text for output in outputs],
                        "tokens": [len(output.outputs[0].token_ids) for output in outputs],
                    }
                )

    return generate


def _load_engine(load: Load, pins_cores: bool) -> Any:
    global _engine
    if _engine is None:
        from pyspark import TaskContext
        from vllm import LLM

        if pins_cores:
            context = TaskContext.get()
            assert context is not None
            core = load.cores[context.partitionId() % len(load.cores)]
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
        _engine = LLM(**load.vllm_arguments())
    return _engine
