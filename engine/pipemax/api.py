"""Offer the engine as a library: submit requests, poll completions. This is the only entry to a running model.

``OfflineEngine`` hides which scheduler runs underneath. It knows nothing of Spark, Arrow or sockets: the server
(``pipemax.serve``) and a plain Python script use it in the same way. Importing this module does not import vLLM;
creating an ``OfflineEngine`` does.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Self

from pipemax.config import EngineConfig as EngineConfig
from pipemax.domain.errors import EngineStartError
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts
from pipemax.endpoint_config import AnyConfig, EndpointConfig
from pipemax.engine import Engine, EngineStats
from pipemax.generation import Completion, GenerationRequest, Image, Message, RequestError, Sampling
from pipemax.node.gpus import engine_gpus
from pipemax.policy.compare import PolicyChoice
from pipemax.policy.layout_start import settle_layout
from pipemax.replicas.replica_set import ReplicaSet
from pipemax.sim.measured_engine import MeasuredEngine

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "GenerationRequest",
    "Image",
    "Message",
    "OfflineEngine",
    "RequestError",
    "Sampling",
]


class OfflineEngine:
    """A model, loaded and ready, under the scheduler that its config names; several times, if it asks for replicas.

    >>> with OfflineEngine(EngineConfig(model="path/to/checkpoint")) as engine:
    ...     for completion in engine.generate([GenerationRequest(request_id="1", prompt="Hello")]):
    ...         print(completion.text)
    """

    def __init__(self, config: AnyConfig) -> None:
        """Load the model, and block until that is done. ``EngineStartError`` says why it could not be loaded.

        The layout of the machine's GPUs is settled before, where the config leaves it open.
        """
        self._engine: Engine
        self.measured: MeasuredEngine | None = None
        """What the simulator needs to know of the engine; None under stock vLLM, if nothing was measured, or if there
        are several replicas."""
        self.policy_choice: PolicyChoice | None = None
        """The scheduler that runs underneath, and why; None for an endpoint, which schedules by itself."""
        if isinstance(config, EndpointConfig):
            # aiohttp is in the environment of endpoints only.
            from pipemax.endpoints.engine import EndpointEngine

            self._engine = EndpointEngine(config)
            return
        try:
            layout = settle_layout(config, os.environ, engine_gpus(os.environ))
        except ValueError as error:
            raise EngineStartError(str(error)) from None
        config = layout.config
        if config.num_replicas > 1:
            replicas = ReplicaSet(config)
            self._engine, self.policy_choice = replicas, replace(replicas.policy_choice, layout=layout.reason)
            return
        # vLLM takes ten seconds to import: only a process that runs an engine pays for it.
        from pipemax.policy.start import start_engine

        started = start_engine(config)
        self._engine, self.policy_choice = started.engine, replace(started.choice, layout=layout.reason)
        self.measured = started.engine.measured

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``Engine.submit``."""
        self._engine.submit(requests)

    def poll(self, timeout_s: float) -> list[Completion]:
        """See ``Engine.poll``."""
        return self._engine.poll(timeout_s)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Engine.abort``."""
        self._engine.abort(request_ids)

    def set_input_open(self, is_open: bool) -> None:
        """See ``Engine.set_input_open``."""
        self._engine.set_input_open(is_open)

    def admission_credit_tokens(self) -> int:
        """See ``Engine.admission_credit_tokens``."""
        return self._engine.admission_credit_tokens()

    def most_limits(self) -> list[StepLimits]:
        """See ``Engine.most_limits``."""
        return self._engine.most_limits()

    def limits(self) -> list[StepLimits]:
        """See ``Engine.limits``."""
        return self._engine.limits()

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        """See ``Engine.set_limits``."""
        self._engine.set_limits(limits)

    def take_step_records(self) -> list[StepRecords]:
        """See ``Engine.take_step_records``."""
        return self._engine.take_step_records()

    def speculate(self, replicas: Collection[int]) -> None:
        """See ``Engine.speculate``."""
        self._engine.speculate(replicas)

    def tuning_facts(self) -> TuningFacts | None:
        """See ``Engine.tuning_facts``."""
        return self._engine.tuning_facts()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        choice = self.policy_choice
        return replace(self._engine.stats(), policy={} if choice is None else asdict(choice))

    def close(self) -> None:
        """See ``Engine.close``."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Submit requests and yield their completions in the order in which they end, one for each.

        This is for a caller without its own polling loop.
        """
        self.submit(requests)
        outstanding = len(requests)
        while outstanding:
            ended = self.poll(timeout_s=1.0)
            outstanding -= len(ended)
            yield from ended
