"""Show a study of simulated systems as a readable table."""

from rich import box
from rich.table import Table

from lab.paper.study import Study
from pipemax.sim.result import STEADY_SHARE


def table(study: Study) -> Table:
    """Return the study as a table for ``rich.print``, the fastest system first."""
    kv = " with 8-bit KV" if study.kv_bytes_per_value == 1 else ""
    sheet = Table(
        title=f"{study.model}{kv} on {study.node}, {study.workload}, {study.results[0].num_requests:,} requests",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption=f"compute bound: {study.compute_bound_tokens_per_s:,.0f} total tok/s; steady: until "
        f"{STEADY_SHARE:.0%} of the requests had finished",
    )
    sheet.add_column("system", no_wrap=True)
    for heading in (
        "total\ntok/s",
        "output\ntok/s",
        "× vLLM\nTP",
        "steady\ntok/s",
        "decode\nbatch",
        "\nbubble",
        "all-\nreduce",
        "host →\nGPU",
        "recom-\nputed",
        "\nseconds",
    ):
        sheet.add_column(heading, justify="right", no_wrap=True)
    for result in sorted(study.results, key=lambda result: -result.total_tokens_per_s):
        sheet.add_row(
            result.system,
            f"{result.total_tokens_per_s:,.0f}",
            f"{result.output_tokens_per_s:,.0f}",
            f"{study.ratio(result):.2f}",
            f"{result.steady_tokens_per_s:,.0f}",
            f"{result.mean_decode_batch:.1f}",
            f"{result.bubble_fraction:.1%}",
            f"{result.all_reduce_fraction:.1%}",
            f"{result.h2d_fraction:.1%}",
            f"{result.recomputed_tokens:,}",
            f"{result.seconds:,.1f}",
        )
    return sheet
