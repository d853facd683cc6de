"""Grafana's dashboard asks for metrics that are there."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from pipemax.serve.metrics import EngineMetrics
from pipemax.wire import JobStats
from pipemax_spark.report.collector import Collector
from pipemax_spark.report.metrics import RunMetrics
from tests.fakes.server_reports import outlook_after, server_report

DASHBOARD = Path(__file__).parents[3] / "deploy/grafana/pipemax.json"


def exported() -> set[str]:
    report = server_report("s", job=JobStats(rows_done=3, errors={"engine_error": 1}), metrics_port=9)
    collector = Collector(host="127.0.0.1", bind_hosts=["127.0.0.1"], job_id="job")
    with collector:
        outlook_after(collector, report)
        progress = SimpleNamespace(rows_total=4, seconds=lambda: 1.0)
        of_run = RunMetrics(collector, progress, lambda: 2, run_id="r", output="o")  # type: ignore[arg-type]
        families = [*of_run.collect(), *EngineMetrics(lambda: report).collect()]
    return {sample.name for family in families for sample in family.samples}


def test_each_metric_of_the_dashboard_is_served() -> None:
    text = DASHBOARD.read_text()
    asked = {*re.findall(r"\bpipemax_\w+", " ".join(expressions(json.loads(text))))}
    assert len(asked) > 10
    assert asked <= exported()


def expressions(dashboard: dict) -> list[str]:  # type: ignore[type-arg]
    of_panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [variable["query"] for variable in dashboard["templating"]["list"]]
    return [*of_panels, *(query["query"] for query in queries if isinstance(query, dict))]
