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

# -- the choice of a layout, a policy and the sizes of steps (policy, sim) --------------------------------------------

WORTHWHILE_GAIN = 1.02
"""What is not the default is chosen from this ratio on.

2026-11-25 (lab/results/past_the_paper.md): simulations of sampled rows are off by about a percent, and the goal is
a choice within 3 % of the best.
"""
SAMPLE_GAIN = 1.0
"""PipeMax is chosen from this ratio on where a part of a long table is simulated.

2026-11-25 (lab/results/past_the_paper.md): the part ends before PipeMax's memory has been in use for long, so that a
tie there is a gain over the table.
"""
GUESSED_OUTPUTS_GAIN = 0.9
"""PipeMax is chosen from this ratio on where the lengths of outputs are a guess.

2026-11-25 (lab/results/past_the_paper.md): then the fastest step size of stock vLLM is a guess too, and a wrong one
costs up to a third of its rate, where mixed steps lose 3 %.
"""
GUESSED_TIMES_GAIN = 1.3
"""PipeMax is chosen from this ratio on where the step times are a guess: stock vLLM needs none.

2026-11-27, ``python -m lab.bench.engine_vs_vllm --in-turns`` (lab/results/engine_vs_vllm.md): on a CPU, 1.25 by a guess
was 0.87 over two stages, and 1.97 was 1.20 over four.
"""

MIXED_TOKENS_TO_TRY = (512, 2048)
"""Maximum tokens of mixed steps from which one is chosen.

2026-11-25 (lab/results/past_the_paper.md): 2,048 make at least 0.97 of the best maximum's tokens/s over 12,000 rows in
all settings, for steps become smaller by themselves. Over few rows larger steps may have computed all prompts long
before the outputs end: over 2,600 rows of ShareGPT (70B, RTX 5090s) 2,048 made 0.81 of what 512 made.
"""
SHORT_TABLE_TOKENS = 128
"""Maximum tokens of a mixed step that are tried too where the whole table is simulated.

2026-11-25, simulated (lab/log.md): few prompts fill few steps, and steps of different length leave stages idle.
"""
FEW_ROWS = 10
"""With room on the GPUs for fewer rows of each batch, phases are simulated next to mixed steps.

2026-11-25, simulated (lab/log.md): phases were up to 29 % ahead there, and nowhere with room for eighteen.
"""
WAVE_GROUPS = 4
"""Groups of a stage's layers in which an engine with waves computes.

2026-11-26, simulated: more leave little more room for a batch, b = M/n + p(1 - (1 + 1/groups)/n), and make smaller
copies.
"""

GPU_POOL_FILLS = 3.0
"""The simulated rows fill the GPUs' pool at least this many times, or nothing would have to leave it."""
HOST_POOL_FILLS = 1.5
"""And the host's this many times, where that takes no more rows than each choice affords."""
LAYOUT_SAMPLE_ROWS = 9000
"""Rows simulated for each layout at most."""
LAYOUT_ENOUGH_ROWS = 5000
"""Rows that are simulated where the GPUs do not hold more of them.

2026-11-26, ``python -m lab.bench.auto_choice`` (lab/results/layouts.md): with 2,500 rows of ShareGPT the choice for
Mixtral on L20s made 0.91 of the best, because an engine was seen only while it filled its memory.
"""
ENOUGH_OUTPUTS = 50
"""Mean tokens of an output, in grains, in the simulations of PipeMax, and of stock vLLM where they only rule it out.

2026-11-27 (lab/log.md): in six settings PipeMax's rates in grains of four of ShareGPT's or LongBench's tokens were
0.975 to 1.006 times those in grains of two, or token by token.
"""
STOCK_ENOUGH_OUTPUTS = 400
"""Mean tokens of an output, in grains, in the simulations of stock vLLM by which it is chosen, and of a whole table.

2026-11-27 (lab/log.md): in grains of four stock vLLM is preempted less and made up to 1.08 times its rate.
"""
LAYOUT_OVER_SHORT_RUN = 1.06
"""Layouts whose short run for stock vLLM is less than the best rate by this factor are not simulated further.

2026-11-27, 32 layouts of four settings (lab/log.md): all rows, token by token, made 0.895 to 1.056 times its rate.
"""
LAYOUT_OVER_ESTIMATE = 1.2
"""Layouts whose estimate for PipeMax is less than the best rate by this factor are not simulated.

2026-11-27 (lab/results/layouts.md): PipeMax made 0.65 to 1.196 times its estimate.
"""
LAYOUT_WHOLE_TOKENS = 4_000_000
"""A table of more tokens is simulated as a part of a long one when its layout is chosen, for the sake of time.

2026-11-28, quiet machine (lab/results/layouts.md): 6,000 rows of ShareGPT, 3.5 million tokens, took 11 to 31 s of CPU.
"""
LAYOUT_OVER_LARGE_STEPS = 1.09
"""Of a short table, layouts are simulated with other steps too if so many times PipeMax's rate with the largest mixed
steps could be the fastest.

2026-11-28, ``python -m lab.bench.results`` over 6,000 rows: steps of 256 or 512 tokens made up to 1.085 times that rate
(qwen3-32b, four RTX 4090s), phases 1.03, and steps of 128 were nowhere 1 % ahead of all of these.
"""
