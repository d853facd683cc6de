"""Where PipeMax pays: a line for each setting, with the leverage that decides it."""

from collections.abc import Iterable
from dataclasses import replace

from lab.bench.results.cells import System
from lab.bench.results.settings import LONGBENCH, REASONING, ROWS, SHAREGPT, TODAY, Setting
from lab.bench.results.store import Store
from lab.bench.results.tables import drawing, missing
from pipemax.domain.specs import Parallelism, kv_capacity
from pipemax.policy.layouts import Layout
from pipemax.presets import load_workload
from pipemax.sim.stage_times import StageTimes, StepWork

COLUMNS = ("GPUs", "model", "table", "stock vLLM in", "PipeMax in", "PipeMax / stock", "leverage")


def leverage(setting: Setting, layout: Layout) -> float:
    """Return how many times a GPU's room for KV the host link fills while every batch computes one step.

    It is link rate × step time × batches over the room, for steps of decodes as large as stock vLLM's: an n-th of the
    room each, with n stages. Each row has its prompt and half of its output.
    """
    node, model = setting.node_spec().part(layout.gpus_per_engine), setting.model_spec()
    parallelism = Parallelism(tensor=layout.tensor_parallel, pipeline=layout.pipeline_parallel)
    times, capacity = StageTimes(node, model, parallelism), kv_capacity(node, model, parallelism)
    profile = load_workload(setting.workload)
    row_tokens = profile.prompt.mean + profile.output.mean / 2
    rows = max(1, round(capacity.gpu_tokens / layout.pipeline_parallel / row_tokens))
    work = StepWork(decode_requests=rows, decode_context_tokens=round(rows * row_tokens))
    token_bytes = max(times.kv_bytes_per_token(stage) for stage in range(layout.pipeline_parallel))
    link = min(node.link.host_to_gpu_bytes_per_s, node.root_bytes_per_s / node.gpus_per_root)
    step_tokens = link * max(times.stage_s(work)) / token_bytes
    return step_tokens * layout.pipeline_parallel / capacity.gpu_tokens


def page_settings(settings: Iterable[Setting]) -> list[Setting]:
    """Return the first drawing of those that differ in GPUs, model or table, and not in how they are simulated."""
    page = {*TODAY, *SHAREGPT, *LONGBENCH, *REASONING}
    return [*dict.fromkeys(replace(one, seeds=one.seeds[:1]) for one in settings if one in page)]


def print_page(settings: Iterable[Setting], store: Store) -> None:
    """Print the table, the settings with most to gain first; steady rates of the first drawing."""
    lines = []
    for setting in settings:
        cells = [setting.node, setting.model + _kinds(setting), setting.workload]
        if (lack := missing(setting, store)) is not None:
            lines.append((0.0, [*cells, "", "", "not possible" if "fits" in lack else lack, ""]))
            continue
        first = drawing(setting, setting.seeds[0], store)
        first.check()
        stock, ours = first.best([System.STOCK], "steady"), first.best([System.PIPEMAX], "steady")
        assert ours.cell.layout is not None
        ratio = ours.tokens_per_s / stock.tokens_per_s
        layouts = [str(stock.cell.layout), str(ours.cell.layout)]
        lines.append(
            (ratio, [*cells, *layouts, f"{ratio:.2f}", f"{leverage(setting, ours.cell.layout):.2f}"])
        )
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for _, cells in sorted(lines, key=lambda line: -line[0]):
        print("| " + " | ".join(cells) + " |")


def _kinds(setting: Setting) -> str:
    """Return what a setting has that others of its model have not, in words."""
    plain = Setting(node=setting.node, model=setting.model, workload=setting.workload, rows=setting.rows)
    rest = setting.name.removeprefix(plain.name).replace("--", ", ")
    return rest if setting.rows == ROWS else f"{rest}, {setting.rows:,} rows"
