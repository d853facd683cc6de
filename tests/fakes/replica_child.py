"""A replica's process around the fake engine: ``python -m tests.fakes.replica_child DESCRIPTOR``."""

import sys
from typing import Any

from pipemax.api import Engine
from pipemax.config import EngineConfig
from pipemax.replicas.child import EngineFactory, main
from tests.fakes.engine import FakeEngine

COMMAND = (sys.executable, "-m", "tests.fakes.replica_child")
POLICY: dict[str, Any] = {"chosen": "vllm", "reason": "a fake has no scheduler"}


def load_fake() -> EngineFactory:
    def start(config: EngineConfig) -> tuple[Engine, dict[str, Any]]:
        return FakeEngine(config), POLICY

    return start


if __name__ == "__main__":
    main(load_factory=load_fake)
