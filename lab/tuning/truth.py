"""What is true of a setting: the rate under fixed limits, from stock vLLM simulated without noise."""

from dataclasses import dataclass

from lab.tuning.live_engine import QUIET, LiveEngine
from lab.tuning.settings import Setting
from pipemax.domain.step_records import StepLimits, StepRecords
from pipemax.tuning.step_fit import WorkCosts
from pipemax.tuning.table import Lengths

_ENOUGH_S = 150.0
"""Of a steady engine…"""
_ENOUGH_RESIDENCES = 3.0
"""…and as many times as a row runs, whichever is more."""
_FILL_RESIDENCES = 2.0
_SLICE_S = 5.0
_MAX_ROWS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Weights of tokens, and what a row is worth by them. Steady rates hardly depend on the weights."""

    costs: WorkCosts
    row_work_s: float
    rows_per_s: float
    """Under the default, roughly."""


def truth_of(setting: Setting) -> Truth:
    """Run the default for a while. It costs a second or so."""
    lengths = setting.sample()
    engine = LiveEngine(setting.scenario(_MAX_ROWS, 0), setting.default, QUIET.scatter(0))
    records, num_ended = [], 0
    while num_ended < 2000 and engine.now_s < 300:
        steps, ended = engine.advance(_SLICE_S)
        records.append(steps)
        num_ended += len(ended)
    costs = costs_of(setting, lengths)
    row_s = row_work_s(costs, lengths)
    late = StepRecords.joined(records[len(records) // 2 :])
    return Truth(
        costs=costs,
        row_work_s=row_s,
        rows_per_s=costs.work_s(late) / row_s / float(late.seconds.sum()),
    )


def costs_of(setting: Setting, lengths: Lengths) -> WorkCosts:
    """Return what a token costs by the GPU's arithmetic, and a KV token by its bandwidth."""
    gpu, model = setting.node.gpu, setting.model
    token_s = 2 * model.active_params / gpu.product_flops_per_s(model.weight_dtype)
    return WorkCosts(
        prompt_token_s=token_s,
        decode_s=token_s,
        kv_token_s=model.kv_bytes_per_token / gpu.hbm_bytes_per_s,
        prompts_per_output=lengths.prompts_per_output,
    )


def row_work_s(costs: WorkCosts, lengths: Lengths) -> float:
    """Return the mean work of a row: its prompt, its outputs but the first, and the KV that these read."""
    prompts, decodes = lengths.prompt_tokens, lengths.output_tokens - 1
    kv_tokens = (decodes * (prompts + (decodes + 1) / 2)).mean()
    return float(
        costs.prompt_token_s * prompts.mean() + costs.decode_s * decodes.mean() + costs.kv_token_s * kv_tokens
    )


def steady_rate(setting: Setting, truth: Truth, limits: StepLimits, *, order: int = 1) -> float:
    """Return the rows per second of a steady engine under fixed limits; work done twice does not count.

    ``order`` is the seed of the rows' order.
    """
    num_running = min(limits.running_rows, setting.envelope().rows_that_fit(setting.sample()))
    residence_s = num_running / truth.rows_per_s
    fill_s = max(30.0, _FILL_RESIDENCES * residence_s)
    end_s = fill_s + max(_ENOUGH_S, _ENOUGH_RESIDENCES * residence_s)
    rows = min(_MAX_ROWS, round(2 * truth.rows_per_s * end_s) + 2 * limits.running_rows)
    engine = LiveEngine(setting.scenario(rows, order), limits, QUIET.scatter(0))
    engine.advance(fill_s)
    before = engine.recomputed_tokens
    steps, _ = engine.advance(end_s - fill_s)
    assert engine.num_left > limits.running_rows, (setting.name, limits, rows)
    again_s = (engine.recomputed_tokens - before) * truth.costs.prompt_token_s
    work_s = useful_work_s(truth.costs, steps) - again_s
    return work_s / truth.row_work_s / float(steps.seconds.sum())


def useful_work_s(costs: WorkCosts, steps: StepRecords) -> float:
    """Return the work of steps, recomputed prompts included."""
    return float(
        costs.prompt_token_s * steps.prompt_tokens.sum()
        + costs.decode_s * steps.decodes.sum()
        + costs.kv_token_s * steps.kv_tokens.sum()
    )
