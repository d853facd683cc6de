"""Chooses how an engine's GPUs are divided: replicas × tensor parallelism × pipeline stages.

Every layout that the config leaves open and that the model's heads and the GPUs' memory allow is simulated, over a
node's profile and a sample of the rows, under the policies that the config allows, as ``pipemax plan-capacity`` does.
Pure: it measures nothing and starts nothing. ``policy: auto`` then compares policies in the layout that was chosen, by
what the engine measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pipemax.config import Policy
from pipemax.domain.specs import ModelSpec, NodeSpec
from pipemax.policy.capacity import (
    ALL_SIZES,
    CapacityOption,
    Layout,
    StepSizes,
    layout_refusal,
    options_of,
    possible_layouts,
)
from pipemax.policy.compare import ChosenPolicy, verdict
from pipemax.sim.workloads import Workload

SAMPLE_ROWS = 1500
"""Rows simulated for each layout at most."""
_FIRST_SIZES = StepSizes(stock=(1024,), mixed=(512,))
_WORTH_A_SEARCH = 0.75
"""Layouts that make less than this share of the fastest one's tokens/s with the first sizes are given up: the best
size of a step makes an engine faster by a fifth at most, mostly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLayout:
    """The parts of a layout that the engine config fixes; ``None`` leaves a part open."""

    replicas: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None

    def allows(self, layout: Layout) -> bool:
        pairs = (
            (self.replicas, layout.replicas),
            (self.tensor_parallel, layout.tensor_parallel),
            (self.pipeline_parallel, layout.pipeline_parallel),
        )
        return all(fixed is None or fixed == own for fixed, own in pairs)

    def __str__(self) -> str:
        parts = (
            ("replicas", self.replicas),
            ("tensor_parallel_size", self.tensor_parallel),
            ("pipeline_parallel_size", self.pipeline_parallel),
        )
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None) or "nothing fixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """The layout to run, and how it compares."""

    layout: Layout
    best: CapacityOption | None
    """The chosen layout's best policy; None if there was only one layout, which was not simulated."""
    second: CapacityOption | None
    """The best option of another layout; None if there is none."""
    not_possible: tuple[str, ...]
    """The layouts that were left out, each with the reason."""

    @property
    def reason(self) -> str:
        """One clause."""
        if self.best is None:
            return f"{self.layout}: the only layout possible"
        if self.second is None:
            return f"{self.layout}: no other layout is possible, simulated {self.best.tokens_per_s:,.0f} tokens/s"
        return (
            f"{self.layout}: simulated {self.best.tokens_per_s:,.0f} tokens/s ({_policy(self.best)}), second "
            f"{self.second.layout} with {self.second.tokens_per_s:,.0f} ({_policy(self.second)}), "
            f"{self.best.tokens_per_s / self.second.tokens_per_s:.2f}×"
        )


def choose_layout(
    node: NodeSpec,
    model: ModelSpec,
    sample: Workload,
    *,
    rows: int,
    fixed: FixedLayout,
    policy: Policy = Policy.AUTO,
) -> LayoutChoice:
    """Return the fastest layout of the node's GPUs for a table of ``rows`` rows like the sample.

    A layout with PipeMax is taken before one with stock vLLM only where it is faster by what ``policy: auto`` asks for.
    Raise ``ValueError`` if no layout is possible, with the reason of each.
    """
    allowed = [layout for layout in possible_layouts(node) if fixed.allows(layout)]
    refusals = {layout: layout_refusal(node, model, layout) for layout in allowed}
    not_possible = tuple(f"{layout}: {why}" for layout, why in refusals.items() if why is not None)
    possible = [layout for layout, why in refusals.items() if why is None]
    if not possible:
        causes = "; ".join(not_possible) or f"none of {node.num_gpus} GPUs fits {fixed}"
        raise ValueError(f"no layout of {node.name} runs {model.name}: {causes}")
    if len(possible) == 1:
        return LayoutChoice(layout=possible[0], best=None, second=None, not_possible=not_possible)
    simulated = partial(_options, node, model, sample, rows=rows, policy=policy)
    first = {layout: simulated(layout, sizes=_FIRST_SIZES) for layout in possible}
    rates = {layout: max((one.tokens_per_s for one in found), default=0.0) for layout, found in first.items()}
    if max(rates.values()) == 0.0:
        raise ValueError(f"policy {policy.value} runs in no possible layout of {node.name}")
    options = []
    for layout in possible:
        is_close = rates[layout] >= _WORTH_A_SEARCH * max(rates.values())
        options += simulated(layout, sizes=ALL_SIZES) if is_close else first[layout]
    best = _best(options)
    others = [option for option in options if option.layout != best.layout]
    return LayoutChoice(
        layout=best.layout,
        best=best,
        second=max(others, key=lambda option: option.tokens_per_s, default=None),
        not_possible=not_possible,
    )


def _options(
    node: NodeSpec,
    model: ModelSpec,
    sample: Workload,
    layout: Layout,
    *,
    rows: int,
    policy: Policy,
    sizes: StepSizes,
) -> list[CapacityOption]:
    return options_of(
        node,
        model,
        layout,
        sample,
        rows=rows,
        with_stock=policy is not Policy.PIPEMAX,
        with_pipemax=policy is not Policy.VLLM,
        sizes=sizes,
    )


def _best(options: Sequence[CapacityOption]) -> CapacityOption:
    """Return the fastest option; stock vLLM's, unless PipeMax's is faster by what is worthwhile."""
    fastest = {
        policy: max(own, key=lambda option: option.tokens_per_s)
        for policy in ChosenPolicy
        if (own := [option for option in options if option.policy is policy])
    }
    if len(fastest) < len(ChosenPolicy):
        return next(iter(fastest.values()))
    chosen, _ = verdict(fastest[ChosenPolicy.PIPEMAX].tokens_per_s / fastest[ChosenPolicy.VLLM].tokens_per_s)
    return fastest[chosen]


def _policy(option: CapacityOption) -> str:
    how = "stock vLLM" if option.batching is None else f"PipeMax, {option.batching}"
    return f"{how}, steps of {option.chunk_tokens:,}"
