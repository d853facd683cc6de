"""The bench of what the host costs: real messages through vLLM's queues, and the fields that it promises."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench import host_cost
from pipemax.config import Policy
from pipemax.domain.plan import Batching


def test_each_kind_of_step_has_its_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(host_cost, "_WARM_UP_STEPS", {Policy.VLLM: 60, Batching.SEPARATED: 10})
    arguments = ["--live", "200", "--steps", "30", "--systems", "vllm_pp,pipemax", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["host_cost.py", *arguments])
    assert host_cost.main() == 0
    stock, ours = json.loads(path.read_text())
    assert (stock["system"], ours["system"]) == ("vllm_pp", "pipemax")
    assert (ours["live"], ours["waiting"]) == (200, 0)
    assert {"prompts", "decode"} <= ours["by_kind"].keys()
    for entry in (stock, ours):
        for rows in entry["by_kind"].values():
            assert set(host_cost.PARTS) <= rows.keys()
            medians = {part: rows[part][0] for part in host_cost.PARTS}
            assert medians["core"] > medians["schedule"] > 0
            assert min(medians["send"], medians["receive"], medians["take_in"], medians["reply"]) > 0
            assert (medians["connector"] > 0) == (entry is ours)
            assert rows["sent_bytes"] > 1000
    assert "pipemax: 200 requests" in capsys.readouterr().out


def test_steps_are_told_apart_by_what_they_decode() -> None:
    costs = [host_cost.StepCost(num_requests=number % 3, num_tokens=9, kind="mixed") for number in range(50)]
    found = host_cost._by_kind(costs, 40)
    assert [*found] == ["mixed"]
    assert found["mixed"]["steps"] == 40


def entry(system: str, live: int, **core_ms: tuple[float, float]) -> dict[str, Any]:
    """``core_ms``: by kind of step, the core's median milliseconds and the decodes of a step."""
    kinds = {kind: {"core": [ms, 2 * ms], "mean_decodes": decodes} for kind, (ms, decodes) in core_ms.items()}
    return {"system": system, "live": live, "by_kind": kinds}


def test_the_difference_is_to_stock_vllm_with_as_many_requests() -> None:
    found = [
        entry("vllm_pp", 20_000, decode=(1.4, 70.0), mixed=(1.8, 80.0)),
        entry("pipemax", 20_000, prompts=(1.6, 0.0), decode=(7.0, 200.0)),
        entry("pipemax_mixed", 20_000, mixed=(5.0, 100.0)),
        entry("pipemax", 100_000, decode=(8.0, 200.0)),
    ]
    assert host_cost.differences(found) == [
        "pipemax, 20,000 requests: 35.0 µs a decode, of which stock vLLM's own loop takes 20.0 and PipeMax 15.0",
        "pipemax_mixed, 20,000 requests: 50.0 µs a decode, of which stock vLLM's own loop takes 20.0 and PipeMax "
        "30.0",
    ]
