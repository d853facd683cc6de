"""The tables in Markdown, and what must hold of their figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from lab.bench.results.cells import Cell, System, is_short, layouts_of, pipemax_cells, steady_rate
from lab.bench.results.settings import Setting
from lab.bench.results.store import Store

LIKELY_RATIOS = (0.3, 4.0)
"""A ratio outside of these is an error of the simulation, or of this command."""
_OVER_BOUND = 1.05
"""PipeMax may be this much faster than mixed steps on GPUs that hold all KV: its phases may be a little."""
_SAME_TOKENS = 0.02
"""Cells of one table do as many tokens, but for a rest that the replicas do not divide, and rounding."""
KINDS = ("whole", "steady")
COLUMNS = (
    "setting",
    "stock vLLM, tokens/s",
    "in",
    "balanced / stock",
    "PipeMax / stock",
    "PipeMax / balanced",
    "PipeMax in",
    "`auto` takes",
    "of the best",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest run of a system on one drawing of a table."""

    cell: Cell
    run: str
    tokens_per_s: float

    def __str__(self) -> str:
        return f"{self.cell.layout}, {self.run}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The cells of one setting and seed."""

    done: Mapping[Cell, dict[str, Any]]

    def best(self, systems: Iterable[System], kind: str) -> Best:
        """Return the fastest run of these systems by the ``kind`` of rate. ``ValueError``: none was run."""
        wanted = [*systems]
        return max(
            (
                Best(cell=cell, run=name, tokens_per_s=rates[kind])
                for cell, figures in self.done.items()
                if cell.system in wanted
                for name, rates in figures["runs"].items()
            ),
            key=lambda one: one.tokens_per_s,
        )

    def check(self) -> None:
        """Raise ``ValueError`` for figures that cannot be."""
        tokens = [rates["tokens"] for figures in self.done.values() for rates in figures["runs"].values()]
        if max(tokens) > (1 + _SAME_TOKENS) * min(tokens):
            raise ValueError(f"cells of one table did {min(tokens):,} to {max(tokens):,} tokens")
        for kind in KINDS:
            stock = self.best([System.STOCK], kind)
            for system in {cell.system for cell in self.done} - {System.STOCK}:
                figure = self.best([system], kind).tokens_per_s / stock.tokens_per_s
                if not LIKELY_RATIOS[0] < figure < LIKELY_RATIOS[1]:
                    raise ValueError(f"{stock.cell.setting.name}: {system} / stock of {figure:.2f} cannot be")
        bounds = {cell.layout: figures["bound"] for cell, figures in self.done.items() if "bound" in figures}
        for cell, figures in self.done.items():
            if cell.system is System.PIPEMAX:
                steady = steady_rate(figures)
                if steady > _OVER_BOUND * bounds[cell.layout]:
                    raise ValueError(f"{cell.name}: {steady:,.0f} tokens/s, above what all KV on GPUs gives")


def drawing(setting: Setting, seed: int, store: Store) -> Drawing:
    """Return what is done of one drawing of a table."""
    cells = [
        Cell(setting=setting, seed=seed, system=system, layout=layout)
        for layout in layouts_of(setting)
        for system in (System.STOCK, System.BALANCED, System.PIPEMAX)
    ]
    return Drawing(done={cell: store[cell] for cell in cells if cell in store})


def spread(figures: Sequence[float]) -> str:
    """Return the mean of a figure over seeds, and its least and most where there are several."""
    if len(figures) == 1:
        return f"{figures[0]:.2f}"
    return f"{mean(figures):.2f} ({min(figures):.2f}–{max(figures):.2f})"


def row(setting: Setting, kind: str, store: Store) -> list[str]:
    """Return a line of a table. ``ValueError`` where cells are missing, or cannot be."""
    drawings = [drawing(setting, seed, store) for seed in setting.seeds]
    for one in drawings:
        one.check()
    stock = [one.best([System.STOCK], kind) for one in drawings]
    balanced = [one.best([System.STOCK, System.BALANCED], kind) for one in drawings]
    pipemax = [one.best([System.PIPEMAX], kind) for one in drawings]

    def ratio(ours: Sequence[Best], theirs: Sequence[Best]) -> str:
        return spread([a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)])

    taken, of_best = _choice(setting, drawings[0], kind, store)
    return [
        setting.name.replace("--", ", "),
        f"{mean(one.tokens_per_s for one in stock):,.0f}",
        str(stock[0]),
        ratio(balanced, stock),
        ratio(pipemax, stock),
        ratio(pipemax, balanced),
        str(pipemax[0]),
        taken,
        of_best,
    ]


def _choice(setting: Setting, first: Drawing, kind: str, store: Store) -> tuple[str, str]:
    """Return what ``auto`` takes, and its rate as a share of the best of stock vLLM and PipeMax.

    The share is left out for the kind of rate by which ``auto`` does not choose.
    """
    choice = store[Cell(setting=setting, seed=0, system=System.CHOICE)]
    system = System.STOCK if choice["policy"] == "vllm" else System.PIPEMAX
    taken = f"{choice['layout']}, {choice['policy']}"
    if kind != ("whole" if is_short(setting) else "steady"):
        return taken, ""
    rates = [
        max(rates[kind] for rates in figures["runs"].values())
        for cell, figures in first.done.items()
        if cell.system is system and str(cell.layout) == choice["layout"]
    ]
    best = first.best([System.STOCK, System.PIPEMAX], kind).tokens_per_s
    return taken, f"{rates[0] / best:.2f}" if rates else "not run"


def print_tables(groups: Mapping[str, Sequence[Setting]], store: Store) -> None:
    """Print a table for each group and rate; a setting whose cells are not all done says so."""
    for title, settings in groups.items():
        for kind in KINDS:
            print(f"\n### {title}, {'whole run' if kind == 'whole' else 'steady'}\n")
            print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
            for setting in settings:
                if (lack := missing(setting, store)) is not None:
                    print(f"| {setting.name.replace('--', ', ')} | {lack} |")
                else:
                    print("| " + " | ".join(row(setting, kind, store)) + " |")


def missing(setting: Setting, store: Store) -> str | None:
    """Return what is not done of a setting in words; ``None``: nothing."""
    layouts = layouts_of(setting)
    if not any(layout.pipeline_parallel > 1 for layout in layouts):
        return "fits in no layout of several stages"
    for seed in setting.seeds:
        done = drawing(setting, seed, store).done
        if sum(cell.system is System.STOCK for cell in done) < len(layouts):
            return f"seed {seed}: stock vLLM is not done"
        if any(cell not in store for cell in pipemax_cells([replace(setting, seeds=(seed,))], store)):
            return f"seed {seed}: PipeMax is not done"
    if Cell(setting=setting, seed=0, system=System.CHOICE) not in store:
        return "the choice is not done"
    return None
