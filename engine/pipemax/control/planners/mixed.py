"""Forms mixed steps: the decodes of D_i first, then prompt chunks up to the step's maximum of tokens.

Not in the paper, which separates prefill and decode in time. Prompt tokens use arithmetic that a decode step leaves
idle, longer steps hide more prefetches, and steps of equal tokens absorb what lengths unbalance.

A prompt that is complete joins the batch whose step computed its last chunk: that batch's next turn is the last to
come, and by then its token is there. Room for chunks is made as for decodes: by evicting the requests that run last.
"""

from dataclasses import dataclass, field

from pipemax.control.controller_config import ControllerConfig
from pipemax.control.planners.decode import DecodePlanner, DecodeStep
from pipemax.control.planners.prefill import PrefillPlanner, PrefillStep
from pipemax.control.planners.throttle import PromptThrottle
from pipemax.control.state.batches import Batch, Rotation
from pipemax.control.state.request import RequestState
from pipemax.control.state.table import RequestTable
from pipemax.control.times.estimator import MixedWork


@dataclass(slots=True, kw_only=True)
class MixedStep:
    """One step's decodes and chunks."""

    decodes: DecodeStep = field(default_factory=DecodeStep)
    prompts: PrefillStep = field(default_factory=PrefillStep)

    @property
    def states(self) -> list[RequestState]:
        return [*self.decodes.states, *self.prompts.states]

    @property
    def tokens(self) -> list[int]:
        return [1] * len(self.decodes.states) + self.prompts.tokens

    @property
    def work(self) -> MixedWork:
        return MixedWork(
            num_decodes=len(self.decodes.states),
            kv_tokens=self.decodes.kv_tokens,
            prompt_tokens=sum(self.prompts.tokens),
            token_pairs=self.prompts.token_pairs,
        )

    @property
    def evicted(self) -> list[RequestState]:
        return [*self.decodes.evicted, *self.prompts.evicted]

    @property
    def recomputed(self) -> list[RequestState]:
        return [*self.decodes.recomputed, *self.prompts.recomputed]


class MixedPlanner:
    """Forms each step from a decode batch and the prompts in line."""

    def __init__(
        self,
        config: ControllerConfig,
        table: RequestTable,
        rotation: Rotation,
        decode: DecodePlanner,
        prefill: PrefillPlanner,
        throttle: PromptThrottle,
    ) -> None:
        self._config = config
        self._table = table
        self._rotation = rotation
        self._decode = decode
        self._prefill = prefill
        self._throttle = throttle

    def form(self, *, begins: bool, anything_in_flight: bool) -> MixedStep:
        """Form the next step, which begins prompts only if ``begins``.

        It is empty if none of D_i may run, or if there is nothing to run.
        """
        step_tokens = self._throttle.step_tokens(self._table.live_blocks)
        self._join_last_batch()
        step = MixedStep()
        if not len(self._batch()):
            self._take_chunks(step, step_tokens, begins=begins)
            if step.prompts.states:
                self._decode.pass_empty_turn()
                return step
        step.decodes = self._decode.form()
        begins = begins and not step.decodes.recomputed  # what was dropped would be the first to begin again
        if step.decodes.states:
            self._take_chunks(step, step_tokens, begins=begins)
        elif not anything_in_flight:
            self._unblock(step, begins=begins)
        return step

    def _batch(self) -> Batch:
        """Return D_i."""
        return self._rotation.batches[self._rotation.executing]

    def _join_last_batch(self) -> None:
        """Move the requests whose prompts the last step completed into its batch."""
        if len(self._table.unassigned):
            last = self._rotation.batches[(self._rotation.iteration - 1) % len(self._rotation)]
            for state in [*self._table.unassigned.members]:
                self._table.assign(state, last)

    def _take_chunks(self, step: MixedStep, step_tokens: int, *, begins: bool) -> None:
        self._prefill.take_chunks(
            step.prompts,
            self._rotation.behind() if self._config.overwrites else [],
            max_tokens=max(0, step_tokens - len(step.decodes.states)),
            max_requests=self._config.max_batch_requests - len(self._batch()),
            begins=begins,
        )

    def _unblock(self, step: MixedStep, *, begins: bool) -> None:
        """Let prompts go on where nobody decodes and nothing is in flight, so that something always does.

        Begun prompts may hold the blocks for which D_i waits. They are completed by evicting D_i too, or, if several
        are in each other's way, the youngest is recomputed.
        """
        self._prefill.take_chunks(
            step.prompts,
            [*self._rotation.behind(), self._batch()],
            max_tokens=self._config.step_tokens,
            max_requests=self._config.max_batch_requests,
            begins=begins,
        )
        if not step.prompts.states:
            self._prefill.give_way(step.prompts)
