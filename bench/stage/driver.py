"""One stage of a pipeline, driven by the real controller as if the other stages were there and took as long.

    step      t           t + 1         …           t + n − 1     | t's outputs are known
    stage     | compute t | compute t+1 | …         | compute …   |

A step's tokens are known once it has left the last of n equal stages, that is, when this stage has computed n steps
starting with it; then they are reported to the controller. The stage is never idle, as in a balanced pipeline. It
cannot show the time that a pipeline loses if batches differ. Tokens per second are those of the whole pipeline.
"""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.stage.books import BlockBooks, Held, Piece, PlannedPrefetches
from bench.stage.clock import Mark, synchronize
from bench.stage.model import DecodeBatch, LlamaStage, PromptChunk, TokenPlaces
from bench.stage.pools import PoolPlan
from bench.stage.transfers import copies_for
from pipemax.control.controller import Controller
from pipemax.domain.events import Event, StepCompleted, StepTimed, TransferTimed
from pipemax.domain.plan import Phase, StepId, StepPlan
from pipemax.domain.units import RequestId
from pipemax.sim.systems.pipemax_tokens import StartedStep, TokenBook
from pipemax.sim.workloads import Workload
from pipemax.transfer.backend import StepTransfers
from pipemax.transfer.commands import StepWait

_STEPS_AHEAD = 2
"""Steps that the host plans ahead of the device, so that the device does not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One decode step as it was."""

    batch: int
    kv_tokens: int
    prefetched_blocks: int
    predicted_s: float
    compute_s: float
    """Seconds from when the step had its copies to its end."""
    begin_to_begin_s: float
    """Seconds to the next step's begin, with whatever the stage waited for."""
    host_s: float
    """Seconds of the thread that plans and enqueues: if they exceed the step, the device waits for Python."""
    free_gpu_blocks: int


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    begin: Mark
    ready: Mark
    end: Mark
    host_s: float
    free_gpu_blocks: int


@dataclass(slots=True)
class Run:
    """The records of a run."""

    steps: list[DecodeStep] = field(default_factory=list)
    prefetches: list[tuple[int, float]] = field(default_factory=list)
    """(blocks, seconds) of each step's prefetch."""
    num_prefill_steps: int = 0


class StageDriver:
    """One policy on one stage."""

    def __init__(
        self,
        controller: Controller,
        workload: Workload,
        stage: LlamaStage,
        plan: PoolPlan,
        gpu_rows: torch.Tensor,
        transfers: StepTransfers,
        *,
        num_stages: int,
        computes_prefill: bool,
        keeps_replica: bool = True,
        stores_tokens: bool = True,
    ) -> None:
        """Connect the controller with the stage and its transfers.

        ``computes_prefill``: False books prompts without computing them, since only decode matters here.
        ``stores_tokens``: whether ``transfers`` take single tokens, or only whole blocks.
        """
        self._controller = controller
        self._stage = stage
        self._plan = plan
        self._transfers = transfers
        self._num_stages = num_stages
        self._computes_prefill = computes_prefill
        self._stores_tokens = stores_tokens
        self._kv = plan.layer_views(gpu_rows, plan.gpu_blocks, stage.dtype)
        self._tokens = TokenBook(workload)
        self.books = BlockBooks(
            gpu_blocks=plan.gpu_blocks,
            host_blocks=plan.host_blocks,
            block_tokens=plan.block.block_tokens,
            keeps_replica=keeps_replica,
        )
        self._in_flight: deque[tuple[StepId, StartedStep]] = deque()
        self._launched: deque[_Launched] = deque()
        self._prefetching: deque[tuple[StepId, int]] = deque()
        self._events: list[Event] = [*self._tokens.admissions()]
        self._turn_began_s = 0.0
        self.run = Run()
        self.last_hidden: torch.Tensor | None = None

    def drive(self, num_decode_steps: int) -> Run:
        """Run until so many decode steps have run, or every request has finished."""
        launched = 0
        while launched < num_decode_steps:
            self._turn_began_s = time.perf_counter()
            self._controller.apply(self._events)
            self._events = []
            if self._controller.num_unfinished == 0:
                break
            plan = self._controller.plan_step(time.perf_counter())
            if plan.is_empty:
                assert self._in_flight, f"the controller waits for nothing: {plan.decision}"
            else:
                self._carry_out(plan)
                launched += plan.phase is Phase.DECODE and bool(plan.run)
            if plan.is_empty or len(self._in_flight) >= self._num_stages:
                self._complete_oldest()
            self._collect(keep=_STEPS_AHEAD)
        self._collect(keep=0)
        synchronize(self._stage.device)
        return self.run

    # -- one step -------------------------------------------------------------------------------------------------

    def _carry_out(self, plan: StepPlan) -> None:
        for request_id in plan.recompute:
            self._tokens.recompute(request_id)
        prefetches = self.books.begin(plan)
        started = self._tokens.start(plan)
        self._events += started.hits
        pieces = self._pieces(plan)
        self.books.grow(pieces)
        is_booked_only = plan.phase is Phase.PREFILL and not self._computes_prefill
        if is_booked_only:
            self.run.num_prefill_steps += 1
        else:
            self._step(plan, pieces, prefetches)
        if plan.run:
            self._in_flight.append((plan.step_id, started))

    def _step(self, plan: StepPlan, pieces: list[Piece], prefetches: PlannedPrefetches) -> None:
        device = self._stage.device
        copies = copies_for(
            self._plan, self.books.copies(pieces, prefetches), stores_tokens=self._stores_tokens
        )
        if copies.num_prefetches:
            self._prefetching.append((plan.step_id, len(prefetches)))
        begin = Mark(device)
        self._take(self._transfers.begin_step(copies))
        self._transfers.start_prefetches(copies)
        ready = Mark(device)
        if plan.run:
            match plan.phase:
                case Phase.DECODE:
                    self.last_hidden = self._decode(plan.run)
                case Phase.PREFILL:
                    self._prefill(pieces)
                    self.run.num_prefill_steps += 1
        self._transfers.end_step(copies)
        if plan.run and plan.phase is Phase.DECODE:
            self._launched.append(
                _Launched(
                    plan,
                    begin,
                    ready,
                    end=Mark(device),
                    host_s=time.perf_counter() - self._turn_began_s,
                    free_gpu_blocks=self.books.num_free_gpu,
                )
            )

    def _pieces(self, plan: StepPlan) -> list[Piece]:
        """Return the pieces that a plan's step computes.

        The controller's chunks may reach past a prompt's end; the table of tokens knows where that is.
        """
        pieces = []
        for request_id, num_tokens in zip(plan.run, plan.run_tokens, strict=True):
            held = self.books.held.get(request_id)
            first = held.num_tokens if held is not None else 0
            if plan.phase is Phase.PREFILL:
                num_tokens = self._tokens.kv_tokens(request_id) - first
            pieces.append(Piece(request_id=request_id, first_token=first, num_tokens=num_tokens))
        return pieces

    def _decode(self, requests: tuple[RequestId, ...]) -> torch.Tensor:
        held = [self.books.held[request_id] for request_id in requests]
        lengths = np.array([h.num_tokens for h in held], dtype=np.int32)
        batch = DecodeBatch(
            places=self._places([(h, h.num_tokens - 1, 1) for h in held]),
            tables=self._put(self.books.tables(requests)),
            lengths=self._put(lengths),
        )
        return self._stage.decode(self._stage.hidden(len(requests)), self._kv, batch)

    def _prefill(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            held = self.books.held[piece.request_id]
            chunk = PromptChunk(
                places=self._places([(held, piece.first_token, piece.num_tokens)]),
                table=self._put(self.books.tables([piece.request_id])[0]),
                first_token=piece.first_token,
                num_tokens=piece.num_tokens,
            )
            self._stage.prefill(self._stage.hidden(piece.num_tokens), self._kv, chunk)

    def _places(self, runs: list[tuple[Held, int, int]]) -> TokenPlaces:
        """Return where tokens ``[first, first + count)`` of each request go on the GPU."""
        block_tokens = self._plan.block.block_tokens
        places = [
            (held.gpu[token // block_tokens], token % block_tokens)
            for held, first, count in runs
            for token in range(first, first + count)
        ]
        table = self._put(np.array(places, dtype=np.int64))
        return TokenPlaces(blocks=table[:, 0], slots=table[:, 1])

    def _put(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._stage.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._stage.device, non_blocking=True)

    # -- what is heard of -----------------------------------------------------------------------------------------

    def _complete_oldest(self) -> None:
        step_id, started = self._in_flight.popleft()
        finished = self._tokens.complete(started.outputs)
        self._events.append(StepCompleted(step_id=step_id, finished=finished))
        for request_id in finished:
            self.books.finish(request_id)

    def _take(self, wait: StepWait) -> None:
        for prefetch in wait.prefetches:
            step_id, num_blocks = self._prefetching.popleft()
            self.run.prefetches.append((num_blocks, prefetch.seconds))
            self._events.append(
                TransferTimed(step_id=step_id, num_blocks=num_blocks, stage_s=(prefetch.seconds,))
            )

    def _collect(self, keep: int) -> None:
        """Record the times of steps that are over; wait until at most ``keep`` are still running."""
        while len(self._launched) > keep:
            step = self._launched.popleft()
            step.end.wait()
            after = self._launched[0].begin if self._launched else step.end
            after.wait()
            compute_s = step.ready.seconds_until(step.end)
            self._events.append(StepTimed(step_id=step.plan.step_id, stage_s=(compute_s,)))
            self.run.steps.append(
                DecodeStep(
                    batch=len(step.plan.run),
                    kv_tokens=step.plan.decision.run_kv_tokens,
                    prefetched_blocks=step.plan.decision.prefetched_blocks,
                    predicted_s=step.plan.decision.predicted_step_s,
                    compute_s=compute_s,
                    begin_to_begin_s=step.begin.seconds_until(after),
                    host_s=step.host_s,
                    free_gpu_blocks=step.free_gpu_blocks,
                )
            )
