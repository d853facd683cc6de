"""The messages between vLLM's core and its workers, and the connectors' work, timed over a virtual node.

For ``lab/bench/host_cost.py``. The core and its eight workers are in one process here, but what they send each other
goes through vLLM's own ``MessageQueue``, with the calls of its ``MultiprocExecutor``.
"""

import pickle
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lab.virtual_node.executor import VirtualNodeExecutor
from lab.virtual_node.virtual_connector import VirtualConnector
from lab.virtual_node.virtual_device import VirtualDevice
from pipemax.vllm_ext.worker.stage_reports import WorkerReports

NUM_STAGES = 8


class Timer:
    """Adds up a thread's CPU time by name; ``apart`` is left out of what is being timed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._apart_s = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        apart_s, begin_s = self._apart_s, time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - begin_s - (self._apart_s - apart_s)

    @contextmanager
    def apart(self) -> Iterator[None]:
        begin_s = time.thread_time()
        yield
        self._apart_s += time.thread_time() - begin_s

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, defaultdict(float)
        return taken


class ApartDevice:
    """A stage's device, whose own work is left out of the connector's time."""

    def __init__(self, device: VirtualDevice, timer: Timer) -> None:
        self._device = device
        self._timer = timer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._device, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._timer.apart():
                return method(*args, **kwargs)

        setattr(self, name, call)
        return call


TIMER = Timer()
"""Of the one engine that runs in this process; vLLM makes the executor and the connectors by their classes."""


class TimedConnector(VirtualConnector):
    """Times the hooks that a worker calls."""

    def __init__(self, *args: Any, device: VirtualDevice, **kwargs: Any) -> None:
        super().__init__(*args, device=ApartDevice(device, TIMER), **kwargs)  # type: ignore[arg-type]

    def handle_preemptions(self, *args: Any) -> None:
        with TIMER.part("connector"):
            super().handle_preemptions(*args)

    def bind_connector_metadata(self, *args: Any) -> None:
        with TIMER.part("connector"):
            super().bind_connector_metadata(*args)

    def finish_forward(self) -> None:
        with TIMER.part("connector"):
            super().finish_forward()

    def build_connector_worker_meta(self) -> Any:
        with TIMER.part("connector"):
            return super().build_connector_worker_meta()


class Messages:
    """vLLM's queues between a core and its workers, all in this process."""

    def __init__(self, num_workers: int) -> None:
        self.sent_bytes = 0
        """Of all messages to the workers so far, each counted once."""
        self.reply_bytes = 0
        self._to_workers = MessageQueue(num_workers, num_workers)
        handle = self._to_workers.export_handle()
        self._at_workers = [MessageQueue.create_from_handle(handle, rank) for rank in range(num_workers)]
        self._from_workers = [MessageQueue(1, 1) for _ in range(num_workers)]
        self._at_core = [MessageQueue.create_from_handle(q.export_handle(), 0) for q in self._from_workers]
        for writer, readers in [
            (self._to_workers, self._at_workers),
            *((q, [r]) for q, r in zip(self._from_workers, self._at_core, strict=True)),
        ]:
            writer.wait_until_ready()
            for reader in readers:
                reader.wait_until_ready()

    def send(self, message: object) -> None:
        with TIMER.part("send"):
            self._to_workers.enqueue(message)

    def take_in(self) -> None:
        """Have every worker unpickle the message; the time of one is their mean."""
        for reader in self._at_workers:
            with TIMER.part("take_in"):
                reader.dequeue()

    def reply(self, rank: int, output: object) -> None:
        with TIMER.part("reply" if rank + 1 == len(self._from_workers) else "other replies"):
            self._from_workers[rank].enqueue((WorkerProc.ResponseStatus.SUCCESS, output))
        self.reply_bytes += len(pickle.dumps(output, pickle.HIGHEST_PROTOCOL))

    def receive(self, rank: int) -> None:
        with TIMER.part("receive"):
            self._at_core[rank].dequeue()

    def close(self) -> None:
        for queue in (self._to_workers, *self._at_workers, *self._from_workers, *self._at_core):
            queue.shutdown()


class TimedExecutor(VirtualNodeExecutor):
    """Sends what vLLM's ``MultiprocExecutor`` would send, and receives what its workers would reply."""

    connector_class = TimedConnector

    def _init_executor(self) -> None:
        super()._init_executor()
        self.messages = Messages(NUM_STAGES)
        self._stage_reports: list[WorkerReports | None] = []

    def shutdown(self) -> None:
        super().shutdown()
        self.messages.close()

    def execute_model(  # type: ignore[override]  # overloaded there
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[Any]:
        reply_rank = None if self._connectors else NUM_STAGES - 1
        self._call("execute_model", (scheduler_output,), reply_rank)
        return super().execute_model(scheduler_output, non_block)

    def sample_tokens(  # type: ignore[override]  # overloaded there
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> Future[ModelRunnerOutput]:
        reply_rank = None if self._connectors else NUM_STAGES - 1
        self._call("sample_tokens", (grammar_output,), reply_rank)
        future = super().sample_tokens(grammar_output, non_block)
        self._replies(
            [None] * NUM_STAGES
        )  # to execute_model: with sampling to come, workers answer with nothing
        self._replies(self._outputs(future._output))  # type: ignore[attr-defined]  # of StepFuture
        return future

    def _call(self, method: str, args: tuple[Any, ...], reply_rank: int | None) -> None:
        self.messages.send((method, args, {}, reply_rank))
        with self.clock.paused():
            self.messages.take_in()
            self.messages.sent_bytes += len(pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL))

    def _replies(self, outputs: list[Any]) -> None:
        ranks = range(NUM_STAGES) if self._connectors else (NUM_STAGES - 1,)
        for rank in ranks:
            with self.clock.paused():
                self.messages.reply(rank, outputs[rank])
            self.messages.receive(rank)

    def _outputs(self, output: ModelRunnerOutput) -> list[ModelRunnerOutput]:
        """Return each worker's own part of a step's output."""
        if not self._connectors:
            return [output] * NUM_STAGES
        parts = [KVConnectorOutput(kv_connector_worker_meta=reports) for reports in self._stage_reports]
        outputs = [ModelRunnerOutput.with_kv_conn_output_only(part) for part in parts[:-1]]
        return [*outputs, replace(output, kv_connector_output=parts[-1])]

    def _connector_output(self) -> KVConnectorOutput | None:
        merged = super()._connector_output()
        if merged is not None:
            reports = merged.kv_connector_worker_meta
            by_stage = reports.by_stage if isinstance(reports, WorkerReports) else {}
            self._stage_reports = [
                WorkerReports({stage: by_stage[stage]}) if stage in by_stage else None
                for stage in range(NUM_STAGES)
            ]
        return merged
