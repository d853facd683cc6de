"""One real vLLM engine on the demo model, shared: it takes up to a minute to start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipemax.api import OfflineEngine
from pipemax.config import EngineConfig

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "model"
MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def engine() -> Iterator[OfflineEngine]:
    """float32, so that another implementation's arithmetic gives the same tokens."""
    config = EngineConfig(
        model=str(DEMO_MODEL), dtype="float32", max_model_len=MAX_MODEL_LEN, cpu_kv_gib=0.25, max_num_seqs=32
    )
    with OfflineEngine(config) as engine:
        yield engine
