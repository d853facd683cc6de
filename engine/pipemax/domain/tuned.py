"""The constants that were tuned, each with when and how.

Nothing here is derived, and nothing is a limit of vLLM or CUDA: each was the best, or level with the best, of several
values in a simulation or a measurement. Who changes one repeats its command, and writes into ``lab/log.md`` what came
of it. Of the journals named here, ``lab/log.md`` has entries by date, and the pages of ``lab/results`` have tables.
"""

# -- prompts against parked requests (control) ------------------------------------------------------------------------

GPU_LOW_WATERMARK = 1.5
"""Separated batching returns to prefill once live KV is below this many GPU pools; PipeMax, §3.1.3, has 1.0.

2026-11-24, ``python lab/bench/simulation.py thresholds --requests 12000`` (lab/results/simulation.md): 1.25 is level,
1.0 costs up to 3 %, 2.0 up to 2 %.
"""

MIXED_LIVE_WATERMARK = 6.0
"""Mixed batching begins no prompt while live KV is above this many GPU pools.

2026-11-23, simulated (lab/log.md): 1.0, 1.5 and 3 make 0.71, 0.79 and 0.97 of it on four small GPUs; on eight
large ones 3 costs up to 3 %.
"""

THROTTLE_WHOLE_TILE, THROTTLE_FINE_SIZES = 256, (192, 128)
"""Tokens to which mixed steps fall as live KV grows, and the smaller sizes to which they fall a little later."""
THROTTLE_FIRST_SHARE, THROTTLE_TILE_SHARE, THROTTLE_LEAST_SHARE = 0.2, 0.55, 0.58
"""Of the way from one GPU pool of live KV to the watermark: where steps leave their maximum, come to a whole tile and
to the least size.

2026-11-25 (lab/results/past_the_paper.md) and 2026-11-27, ``python -m lab.bench.few_stages --rows 3000``
(lab/results/few_stages.md): with prompts of a few hundred tokens the fine sizes make up to 8 % more tokens/s over two
to four stages; with long prompts, which they would cost 5 %, live KV seldom comes so far.
"""

# -- the choice of what is prefetched (control) -----------------------------------------------------------------------

STEADY_WINDOW = 16
"""w: iterations over which the budget's variation is taken."""
STEADY_THRESHOLD = 0.1
"""Steady once (max − min) / mean of the budget within the window is below this.

2026-11-24, ``python lab/bench/simulation.py thresholds --requests 12000`` (lab/results/simulation.md): 4 to 64
iterations and 0.05 to 0.3 change tokens/s by less than 1 %; these are the middle of the range.
"""

MAX_PREFETCH_REQUESTS = 64
"""Maximum number of requests prefetched in one step.

2026-11-26, simulated over 6,000 rows in five settings (lab/log.md): 32 are within 0.3 % of it, 16 cost up to 8 %.
"""

OVERDUE_ITERATIONS = 512
"""A parked request older than this is prefetched ahead of others…"""
OVERDUE_BUDGET_FRACTION = 0.25
"""…within this share of the budget.

2026-11-27, ``python -m lab.bench.few_stages`` over 1,500 and 3,000 rows (lab/log.md): half of the budget makes 0.955 to
1.01, 64 iterations 0.96 to 1.01; the oldest first makes 0.95 to 1.07, and 0.99 to 1.00 over 9,000 rows.
"""

# -- KV that has left windows -----------------------------------------------------------------------------------------

FREED_ROWS_THAT_PAY = 1.25
"""PipeMax frees what has left windows if the GPUs then hold this many times the rows.

2026-11-25, ``python -m lab.bench.windows`` (lab/results/windows.md): with fewer it gained nothing.
"""
