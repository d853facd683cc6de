"""The largest step that an engine of stock vLLM is started for, by formula.

vLLM keeps room for its largest step from the start on: rows in ``max_num_seqs``, tokens in ``max_num_batched_tokens``.
Within that, the limits of a step may change while it runs. Two numbers decide: how many rows the KV cache holds, and
the prompt tokens that keep so many rows running. It knows shapes and bytes, and neither vLLM nor what a step takes.
The shares and factors are judgements: none was measured.
"""

from dataclasses import dataclass, replace
from typing import Self

from pipemax.domain.model_spec import ModelSpec
from pipemax.domain.specs import NodeSpec, Parallelism, kv_capacity
from pipemax.domain.step_records import StepLimits
from pipemax.domain.units import ceil_div

_ROWS_OVER_KV = 1.15
"""Rows are shorter than the mean in some parts of a table."""
_MOST_ROWS = 4096
_MOST_GRAPH_ROWS = 1024
_LOGITS_SHARE, _LOGIT_BYTES = 0.02, 8
"""Of a GPU's memory, for the logits of all rows: in float32, with a copy."""
_ACTIVATIONS_SHARE = 0.03
_SHORT_STEP = 0.75
"""Steps are doubled if those that keep all rows running are longer than this share of vLLM's default."""
_ROW_MULTIPLE = 8
_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The mean row of a table, in tokens."""

    prompt_tokens: float
    """Those that an engine computes, without a beginning that all prompts share."""
    output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEnvelope:
    """What an engine is started for."""

    ceiling: StepLimits
    """The largest step."""
    begin: StepLimits
    """The limits with which it begins: vLLM's default, or the user's own."""
    graph_rows: int
    """The largest batch of decodes that a CUDA graph should be captured for."""
    rows_of_kv: float
    """Rows of the mean length, half of its output there, that the KV cache holds."""
    token_bytes: float
    """What one more token in a step takes of a GPU's memory."""
    row_bytes: float
    """The same of one more row."""

    @property
    def cost_bytes(self) -> float:
        """An estimate of what ``ceiling`` takes of each GPU's memory beyond ``begin``, without graphs."""
        tokens = self.ceiling.step_tokens - self.begin.step_tokens
        rows = self.ceiling.running_rows - self.begin.running_rows
        return tokens * self.token_bytes + rows * self.row_bytes

    def with_rows(self, most_rows: int) -> Self:
        """Return the envelope of an engine that takes no more rows than this."""
        ceiling = replace(self.ceiling, running_rows=min(most_rows, self.ceiling.running_rows))
        return replace(
            self,
            ceiling=ceiling,
            begin=self.begin.within(ceiling),
            graph_rows=min(most_rows, self.graph_rows),
        )


def plan_envelope(
    node: NodeSpec,
    model: ModelSpec,
    parallelism: Parallelism,
    row: RowShape,
    default: StepLimits,
    *,
    keeps_rows: bool = False,
    keeps_tokens: bool = False,
) -> StartEnvelope:
    """Return the envelope for rows of this shape, nowhere below ``default``, which is vLLM's or the user's own.

    ``keeps_rows`` and ``keeps_tokens`` name those that are the user's own. ``ValueError`` if the model does not fit.
    """
    gpu_bytes = node.gpu.memory_bytes
    capacity = kv_capacity(node, model, parallelism, block_tokens=_BLOCK_TOKENS, frees_windows=True)
    rows_of_kv = capacity.gpu_rows(row.prompt_tokens + row.output_tokens / 2 + _BLOCK_TOKENS / 2)
    rows = default.running_rows
    by_kv = _ROW_MULTIPLE * max(1, ceil_div(round(_ROWS_OVER_KV * rows_of_kv), _ROW_MULTIPLE))
    if not keeps_rows:
        by_logits = int(_LOGITS_SHARE * gpu_bytes / (model.vocab_size * _LOGIT_BYTES))
        rows = max(rows, min(by_kv, by_logits - by_logits % _ROW_MULTIPLE, _MOST_ROWS))
    tokens, token_bytes = default.step_tokens, activation_bytes_per_token(model, parallelism.tensor)
    balanced_tokens = min(rows_of_kv, rows) * (1 + row.prompt_tokens / row.output_tokens)
    fits = 2 * tokens * token_bytes <= _ACTIVATIONS_SHARE * gpu_bytes
    if not keeps_tokens and balanced_tokens > _SHORT_STEP * tokens and fits:
        tokens *= 2
    rows = rows if keeps_rows else min(rows, tokens)  # vLLM refuses a step with fewer tokens than rows
    return StartEnvelope(
        ceiling=StepLimits(step_tokens=tokens, running_rows=rows),
        begin=default,
        graph_rows=min(rows, by_kv, _MOST_GRAPH_ROWS),
        rows_of_kv=rows_of_kv,
        token_bytes=token_bytes,
        row_bytes=model.vocab_size * _LOGIT_BYTES,
    )


def activation_bytes_per_token(model: ModelSpec, tensor: int) -> float:
    """Estimate what one more token in a step takes of a GPU's memory: a layer's residual, inputs and products.

    The widest products are those of the feed-forward part, for each of a token's experts; ``tensor`` GPUs share them.
    """
    widest = model.ffn_size * model.experts_per_token
    if model.dense is not None:
        widest = max(widest, model.dense.ffn_size)
    of_experts = model.hidden_size * model.experts_per_token if model.num_experts > 1 else 0
    return model.bytes_per_value * (4 * model.hidden_size + of_experts + model.ffn_matrices * widest / tensor)


def graph_sizes(graph_rows: int) -> list[int]:
    """Return the batches that CUDA graphs are captured for: vLLM's own up to 512, and every 32 above."""
    usual = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return sorted({size for size in (*usual, *range(544, graph_rows, 32), graph_rows) if size <= graph_rows})
