"""What is compared: nodes that people rent, with the models and tables that they have."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipemax.checkpoint.config_json import load_config_json
from pipemax.checkpoint.model_shapes import model_shapes
from pipemax.domain.hardware import WeightDtype
from pipemax.domain.specs import KvCacheDtype, ModelSpec, NodeSpec
from pipemax.presets import load_model, load_node, load_workload, override
from pipemax.sim.workloads import Workload, draw_workload

ROWS, MANY_ROWS, REASONING_ROWS = 6000, 36_000, 400
"""Rows of a table. A run of few rows spends much of its time in its drain. A reasoning row has as many tokens as eleven
of ShareGPT's, and GPUs hold few of them."""
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A node, a model and a table."""

    node: str
    model: str
    workload: str = "sharegpt"
    weights: WeightDtype = WeightDtype.BF16
    kv_dtype: KvCacheDtype = KvCacheDtype.AUTO
    mixed_cost: float = 1.0
    """What prompt tokens add to a step that also decodes, as a multiple of what the model of step times says."""
    rows: int = ROWS
    seeds: tuple[int, ...] = SEEDS

    @property
    def name(self) -> str:
        """The name of the setting's files."""
        names = (Path(name).name.removesuffix(".yaml") for name in (self.node, self.model, self.workload))
        parts = [*names, f"{self.rows}rows"]
        if self.weights is not WeightDtype.BF16:
            parts.append(f"{self.weights}-weights")
        if self.kv_dtype is not KvCacheDtype.AUTO:
            parts.append(f"{self.kv_dtype}-kv")
        if self.mixed_cost != 1.0:
            parts.append(f"mixed{self.mixed_cost:g}")
        return "--".join(parts)

    def node_spec(self) -> NodeSpec:
        return override(load_node(self.node), {"gpu.mixed_cost": self.mixed_cost})

    def model_spec(self) -> ModelSpec:
        return _model(self.model).with_weights(self.weights).with_kv_dtype(self.kv_dtype)

    def part_of_table(self, seed: int, num_parts: int) -> Workload:
        """Draw the rows of one of so many replicas: each part has the means and medians of the table."""
        rng = np.random.default_rng(seed)
        return draw_workload(load_workload(self.workload), self.rows // num_parts, rng)


def _model(name: str) -> ModelSpec:
    """Return a profile that ships, or the model of a config.json in ``models``, which has the published shapes."""
    path = Path(__file__).parent / "models" / f"{name}.json"
    return model_shapes(name, load_config_json(path), dtype="auto") if path.exists() else load_model(name)


FP8, FP4 = WeightDtype.FP8, WeightDtype.FP4
_TWO_L20 = Setting(node="2xL20", model="qwen3-32b")
_FOUR_L40S = Setting(node="g6e.12xlarge", model="llama2-70b", weights=FP8)
_EIGHT_5090 = Setting(node="rtx5090x8", model="llama2-70b")
MAIN = (_TWO_L20, _FOUR_L40S, _EIGHT_5090)
"""One for each of two, four and eight GPUs."""

SHAREGPT = (
    *MAIN,
    Setting(node="2xRTX-5090", model="qwen3-32b", weights=FP8),
    Setting(node="2xRTX-5090", model="qwen3-32b", weights=FP4),
    Setting(node="Standard_NC48ads_A100_v4", model="llama2-70b", weights=FP8),
    Setting(node="g7e.12xlarge", model="llama2-70b", weights=FP8),
    Setting(node="3xRTX-5090", model="qwen3-32b"),
    Setting(node="g5.12xlarge", model="qwen3-32b", weights=FP8),
    Setting(node="4xRTX-4090", model="qwen3-32b", weights=FP8),
    Setting(node="4xL20", model="llama2-70b"),
    Setting(node="g5.48xlarge", model="llama2-70b", weights=FP8),
    Setting(node="g6.48xlarge", model="llama2-70b", weights=FP8),
    Setting(node="g6e.48xlarge", model="qwen3-235b-a22b", weights=FP8),
    Setting(node="rtx5090x8", model="qwen3-235b-a22b", weights=FP4),
    Setting(node="l20x8", model="llama2-70b"),
    Setting(node="p4de.24xlarge", model="llama2-70b"),
    Setting(node="p5.48xlarge", model="qwen3-235b-a22b"),
)
LONGBENCH = tuple(replace(setting, workload="longbench") for setting in MAIN)
REASONING = tuple(
    replace(setting, workload="reasoning", rows=REASONING_ROWS, seeds=(0,))
    for setting in (
        replace(_TWO_L20, weights=FP8),
        _FOUR_L40S,
        _EIGHT_5090,
        Setting(node="g6.48xlarge", model="qwen3-32b", weights=FP8),
        Setting(node="p5.48xlarge", model="qwen3-235b-a22b"),
    )
)
MIXED_COSTS = tuple(replace(setting, mixed_cost=cost, seeds=(0,)) for setting in MAIN for cost in (1.25, 1.5))
FP8_KV = tuple(replace(setting, kv_dtype=KvCacheDtype.FP8, seeds=(0,)) for setting in MAIN)
LONG = tuple(replace(setting, rows=MANY_ROWS, seeds=(0,)) for setting in MAIN)

TODAY = tuple(
    Setting(node=node, model=model, weights=weights, seeds=(0,))
    for node, model, weights in (
        ("g6.48xlarge", "gpt-oss-120b", WeightDtype.BF16),
        ("rtx5090x8", "gpt-oss-120b", WeightDtype.BF16),
        ("g6e.48xlarge", "gpt-oss-120b", WeightDtype.BF16),
        ("rtx5090x8", "qwen3-32b", FP8),
        ("g6.48xlarge", "llama-3.3-70b", FP8),
        ("g6e.48xlarge", "llama-3.3-70b", FP8),
        ("rtx5090x8", "mixtral-8x7b", WeightDtype.BF16),
        ("rtx5090x8", "glm-4.5-air", FP8),
        ("g6e.48xlarge", "glm-4.5-air", FP8),
        ("g7e.24xlarge", "glm-4.5-air", FP8),
        ("g6e.48xlarge", "minimax-m2", FP8),
        ("g7e.24xlarge", "minimax-m2", FP8),
        ("p4d.24xlarge", "minimax-m2", FP8),
    )
)
GROUPS = {
    "ShareGPT": SHAREGPT,
    "Models of today, ShareGPT": TODAY,
    "LongBench": LONGBENCH,
    "Reasoning": REASONING,
    "Costs of mixed steps": MIXED_COSTS,
    "FP8 KV": FP8_KV,
    f"{MANY_ROWS:,} rows": LONG,
}
"""The tables, and the settings of each."""
