"""distribatch's job with an answer length per row, which the library itself has only per job.

Its engine takes sampling parameters per request, and a job makes the requests: this subclass puts the row's
``max_tokens`` into them. Nothing in the library is changed. This is a module of its own because the Python workers
import it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distribatch import GenerateJob
from distribatch.engines.base import Capabilities
from distribatch.models.specs import PathModel
from distribatch.types import ChatRequest

from lab.bench.peers.load import Load


class JobWithLengths(GenerateJob):
    """A job whose answers have as many tokens as the table's column ``max_tokens`` says."""

    def required_columns(self) -> tuple[str, ...]:
        return (*super().required_columns(), "max_tokens")

    def build_request(
        self, row_id: int, record: Mapping[str, Any], capabilities: Capabilities
    ) -> ChatRequest:
        request = super().build_request(row_id, record, capabilities)
        sampling = request.sampling.model_copy(update={"max_tokens": record["max_tokens"]})
        return replace(request, sampling=sampling)


def make_job(load: Load) -> JobWithLengths:
    arguments = load.vllm_arguments()
    return JobWithLengths(
        model=PathModel(path=arguments.pop("model")),
        engine="vllm",
        engine_options=arguments,
        prompt="{prompt}",
    )
