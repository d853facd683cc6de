"""What a study says: the keys that scripts read, and a trace that a browser opens."""

import json
from pathlib import Path

import pytest

from lab.paper.compute_bound import compute_bound_tokens_per_s
from lab.paper.plots import write_plots
from lab.paper.study import Study, named_systems, run_study
from lab.paper.study_report import json_objects, write_chrome_trace
from tests.unit.sim.machines import small_model, small_node, small_workload


@pytest.fixture(scope="module")
def study() -> Study:
    systems = ["pipemax", "vllm_pp", "static_10", "layer_first"]
    return run_study(small_node(kv_gb=0.4), small_model(), small_workload(80), systems, detailed="pipemax")


def test_json_has_the_agreed_keys_and_the_reference_need_not_be_asked_for(study: Study) -> None:
    objects = json_objects(study)
    assert [entry["system"] for entry in objects] == ["pipemax", "vllm_pp", "static_10", "layer_first"]
    agreed = {
        "system",
        "total_tokens_per_s",
        "output_tokens_per_s",
        "ratio_to_vllm_tp",
        "mean_decode_batch",
        "bubble_fraction",
        "h2d_fraction",
        "seconds",
    }
    assert all(agreed <= entry.keys() for entry in objects)
    ratio = objects[1]["total_tokens_per_s"] / study.reference.total_tokens_per_s
    assert objects[1]["ratio_to_vllm_tp"] == pytest.approx(ratio, abs=1e-3)
    json.dumps(objects)


def test_no_system_passes_the_compute_bound(study: Study) -> None:
    bound = compute_bound_tokens_per_s(small_node(), small_model(), small_workload(80))
    assert study.compute_bound_tokens_per_s == bound
    assert all(result.total_tokens_per_s < bound for result in study.results)


def test_chrome_trace_has_stages_and_both_copy_directions(study: Study, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(study.results[0], path)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2}
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_predicted_and_measured_times_are_drawn(study: Study, tmp_path: Path) -> None:
    paths = write_plots(study, tmp_path / "plots")
    assert sorted(path.name for path in paths) == [
        "layout.png",
        "overall.png",
        "static.png",
        "time_and_memory.png",
    ]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_progress_counts_up_to_all_requests() -> None:
    seen: list[tuple[str, int]] = []
    run_study(
        small_node(),
        small_model(),
        small_workload(50),
        ["vllm_tp"],
        on_progress=lambda name, finished: seen.append((name, finished)),
    )
    assert seen[-1] == ("vllm_tp", 50)
    counts = [finished for _, finished in seen]
    assert counts == sorted(counts)


def test_systems_are_named_on_one_line() -> None:
    node = small_node()
    assert named_systems("pipemax, vllm_pp", node) == ["pipemax", "vllm_pp"]
    assert "static_25" in named_systems("all", node)
    assert "static_25" not in named_systems("baselines", node)
