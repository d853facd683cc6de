"""Decides ``policy: auto``: draws rows to simulate from what is known of the table, and chooses by simulations.

Output lengths are not known beforehand: they are assumed to be log-normal, as those of chats are, cut at the rows'
maximum, with a quarter of it as their mean unless the config says how many to expect. Pure: it starts nothing.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipemax.config import BatchingChoice, RowLengths
from pipemax.domain.tuned import ENOUGH_OUTPUTS, GPU_POOL_FILLS, HOST_POOL_FILLS, STOCK_ENOUGH_OUTPUTS
from pipemax.policy.compare import PolicyChoice
from pipemax.policy.measured_choice import BatchingPlan, Rows, choose_batching, compare_policies
from pipemax.sim.measured_engine import MeasuredEngine
from pipemax.sim.workloads import Workload, grain_of

_FEWEST_SIMULATED_ROWS = 100
_MOST_OUTPUTS, _MOST_DECODE_STEPS = 1_000_000, 10_000
"""Some five seconds of simulating PipeMax with one size of mixed steps."""
_ROUNDS = 6
"""So many rows for each place in a batch are enough, however much memory there is."""
_OUTPUT_SPREAD = 0.94
"""Standard deviation of the logarithm of ShareGPT's output lengths (mean 237, median 152)."""
_ASSUMED_MAX_TOKENS = 256
_ASSUMED_MOST_PROMPT_TOKENS = 1024


def choose_policy(
    engine: MeasuredEngine,
    lengths: RowLengths | None,
    *,
    batching: BatchingChoice = BatchingChoice.AUTO,
    mixed_step_tokens: int | None = None,
    chunk_is_free: bool = False,
) -> PolicyChoice:
    """Choose a policy by rows drawn from the sampled lengths; without any, by an assumption that the reason names.

    For the other arguments see ``compare_policies``.
    """
    assumed = lengths is None
    lengths = lengths or assumed_lengths(engine.max_model_len)
    choice = compare_policies(
        engine,
        draw_rows(engine, lengths),
        batching=batching,
        mixed_step_tokens=mixed_step_tokens,
        chunk_is_free=chunk_is_free,
        inputs=_inputs(lengths, assumed=assumed),
    )
    if not assumed:
        return choice
    reason = (
        f"{choice.reason}, for rows nobody sampled: prompts of up to {max(lengths.prompt_tokens)} tokens, "
        f"outputs of up to {lengths.max_tokens}"
    )
    return replace(choice, reason=reason)


def choose_batching_for(
    engine: MeasuredEngine,
    lengths: RowLengths | None,
    batching: BatchingChoice,
    mixed_step_tokens: int | None,
) -> BatchingPlan | None:
    """Choose how PipeMax batches, for an engine that runs PipeMax in any case; None if nothing is left to choose."""
    if batching is BatchingChoice.SEPARATED or (
        batching is BatchingChoice.MIXED and mixed_step_tokens is not None
    ):
        return None
    rows = draw_rows(engine, lengths or assumed_lengths(engine.max_model_len))
    return choose_batching(engine, rows, batching, mixed_step_tokens)


def draw_rows(engine: MeasuredEngine, lengths: RowLengths, *, seed: int = 0) -> Rows:
    """Return the rows to simulate: as many as the table has, if that is few enough."""
    mean_output = lengths.expected_output_tokens
    prompts = np.minimum(np.array(lengths.prompt_tokens, dtype=np.int64), engine.max_model_len - 1)
    count = _rows_to_simulate(engine, float(prompts.mean()) + mean_output, mean_output)
    is_whole_table = lengths.rows is not None and lengths.rows <= count
    if is_whole_table:
        assert lengths.rows is not None
        count = lengths.rows
    workload = draw_sample(lengths, count, max_model_len=engine.max_model_len, seed=seed)
    return Rows(
        workload=workload,
        is_whole_table=is_whole_table,
        outputs_are_known=lengths.mean_output_tokens is not None,
        grain=_grain(engine, workload, STOCK_ENOUGH_OUTPUTS if is_whole_table else ENOUGH_OUTPUTS),
        stock_grain=_grain(engine, workload, STOCK_ENOUGH_OUTPUTS),
    )


def _grain(engine: MeasuredEngine, workload: Workload, enough_outputs: int) -> int:
    return grain_of(workload, engine.capacity.block_tokens, enough_outputs=enough_outputs)


def draw_sample(lengths: RowLengths, count: int, *, max_model_len: int, seed: int = 0) -> Workload:
    """Return ``count`` rows with prompts of these lengths, and outputs of the lengths that are told or assumed."""
    rng = np.random.default_rng(seed)
    prompts = np.minimum(np.array(lengths.prompt_tokens, dtype=np.int64), max_model_len - 1)
    prompts = np.maximum(1, rng.choice(prompts, count))
    outputs = _output_lengths(rng.standard_normal(count), lengths.expected_output_tokens, lengths.max_tokens)
    return Workload(
        name="sampled rows",
        prompt_tokens=prompts,
        output_tokens=np.maximum(1, np.minimum(outputs, max_model_len - prompts)),
        shared_prefix_tokens=min(lengths.shared_prefix_tokens, int(prompts.min()) - 1),
    )


def _rows_to_simulate(engine: MeasuredEngine, tokens_per_row: float, outputs_per_row: float) -> int:
    """Return a number of rows at which the engine works as in the midst of a long table."""
    capacity, places = engine.capacity, engine.num_batches * engine.max_num_seqs
    gpu_rows = engine.stock_capacity.gpu_rows(tokens_per_row)
    host_rows = capacity.host_blocks * capacity.block_tokens / tokens_per_row
    batch = max(1.0, min(engine.max_num_seqs, gpu_rows / engine.num_batches))
    affordable = min(_MOST_OUTPUTS, _MOST_DECODE_STEPS * batch) / outputs_per_row
    wanted = max(GPU_POOL_FILLS * gpu_rows, min(HOST_POOL_FILLS * host_rows, affordable))
    return int(max(_FEWEST_SIMULATED_ROWS, min(wanted, _ROUNDS * places)))


def _output_lengths(deviates: npt.NDArray[np.float64], mean: float, longest: int) -> npt.NDArray[np.int64]:
    """Return log-normal lengths from 1 to ``longest`` with this mean, by standard normal deviates."""

    def cut(location: float) -> npt.NDArray[np.int64]:
        lengths: npt.NDArray[np.float64] = np.rint(np.exp(location + _OUTPUT_SPREAD * deviates))
        return np.clip(lengths, 1, longest).astype(np.int64)

    low, high = -10.0, np.log(longest) + 10.0
    for _ in range(50):
        location = (low + high) / 2
        low, high = (location, high) if cut(location).mean() < mean else (low, location)
    return cut(high)


def assumed_lengths(max_model_len: int) -> RowLengths:
    """Return the lengths of rows that nobody sampled."""
    longest = max(1, min(_ASSUMED_MOST_PROMPT_TOKENS, max_model_len // 2))
    prompts = tuple(range(max(1, longest // 16), longest + 1, max(1, longest // 16)))
    values = {"prompt_tokens": prompts, "max_tokens": min(_ASSUMED_MAX_TOKENS, longest)}
    return RowLengths.model_validate(values)


def _inputs(lengths: RowLengths, *, assumed: bool) -> dict[str, float | str]:
    return {
        "lengths": "assumed" if assumed else f"{len(lengths.prompt_tokens)} sampled rows",
        "max_tokens": lengths.max_tokens,
        "table_rows": "unknown" if lengths.rows is None else lengths.rows,
    }
