"""What ``plan-capacity`` would set by simulation, before any engine runs: only the tokens of a step."""

from lab.tuning.settings import TABLES, Setting
from pipemax.domain.step_records import StepLimits
from pipemax.policy.capacity import plan_capacity
from pipemax.policy.layout_runs import MAX_NUM_SEQS

_ROWS_OF_TABLE = 1_000_000


def planned_limits(setting: Setting) -> dict[str, StepLimits]:
    """Return the plan's steps with the rows that it simulates (``simulated``), and with vLLM's default (``set``)."""
    plan = plan_capacity(setting.node, setting.model, TABLES[setting.table], rows=_ROWS_OF_TABLE)
    tokens = next(option.chunk_tokens for option in plan.options if option.batching is None)
    rows = {"simulated": MAX_NUM_SEQS, "set": setting.default.running_rows}
    return {
        kind: StepLimits(step_tokens=tokens, running_rows=min(running, tokens))
        for kind, running in rows.items()
    }
