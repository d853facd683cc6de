"""The demo model's engine config, for what is kept about it."""

from pathlib import Path

from pipemax.config import EngineConfig

DEMO_MODEL = str(Path(__file__).parents[4] / "examples" / "model")


def two_stages(**values: object) -> EngineConfig:
    """Two pipeline stages under policy pipemax; ``values`` are fields to change."""
    defaults = {"model": DEMO_MODEL, "policy": "pipemax", "pipeline_parallel_size": 2, "max_model_len": 512}
    return EngineConfig.parse(defaults | values)
