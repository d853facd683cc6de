"""The bench over a virtual node: what it runs, and the fields that it promises."""

import json
import sys
from pathlib import Path

import pytest

from lab.virtual_node import __main__ as virtual_node
from pipemax.config import Policy
from pipemax.presets import load_model, load_node


def test_stock_vllm_is_run_over_a_curve_of_chunks_and_in_every_layout() -> None:
    chosen = virtual_node.settings(load_node("rtx5090x8"), load_model("llama2-70b"))
    assert [one.chunk_tokens for one in chosen if one.system == "vllm_pp"] == [
        128, 256, 512, 1024, 2048, 4096, 8192
    ]  # fmt: skip
    assert {(one.system, one.tensor) for one in chosen if one.policy is Policy.VLLM} == {
        ("vllm_pp", 1),
        ("vllm_pp_offload", 1),
        ("vllm_tp", 8),
        ("vllm_t4p2", 4),
        ("vllm_t2p4", 2),
    }
    assert chosen[-1].policy is Policy.PIPEMAX


def test_the_json_has_the_fields_that_are_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, lengths = tmp_path / "figures.json", tmp_path / "short.jsonl"
    lengths.write_text('{"prompt_tokens": 300, "completion_tokens": 12}\n' * 20)
    arguments = [
        "--kv-dtype",
        "fp8",
        "--workload",
        str(lengths),
        "--systems",
        "vllm_tp,vllm_pp_offload,pipemax",
        "--host-factor",
        "0",
        "--check-kv",
    ]
    monkeypatch.setattr(sys, "argv", ["virtual_node.py", *arguments, "--json", str(path)])
    assert virtual_node.main() == 0
    entries = json.loads(path.read_text())
    offload = ["vllm_pp_offload"] * 2
    assert [entry["system"] for entry in entries] == ["vllm_tp", "vllm_tp", *offload, "pipemax"]
    assert [entry["simulated_tokens_per_s"] is None for entry in entries] == [False, False, True, True, False]
    promised = {"node", "model", "kv_bytes_per_value", "workload", *virtual_node.COLUMNS}
    assert all(promised <= entry.keys() for entry in entries)
    assert {(entry["workload"], entry["rows"]) for entry in entries} == {("short", 20)}
    assert {entry["kv_bytes_per_value"] for entry in entries} == {1}
    best = max(entry["total_tokens_per_s"] for entry in entries[:4])
    assert entries[4]["ratio_to_best_stock"] == pytest.approx(
        entries[4]["total_tokens_per_s"] / best, abs=1e-3
    )
    assert all(entry["host_bubble"] == 0.0 for entry in entries)
    assert "| pipemax |" in capsys.readouterr().out
