"""Run as a script in Airflow's environment: a job in a DAG that is tried again, and which ends are tried again.

``airflow_try.py job`` in the folder of DAGs, with the command as JSON in ``TRIED_COMMAND`` and the file for its summary
in ``TRIED_SUMMARY``; ``airflow_try.py ends``.
"""

import json
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from pipemax_operator import PipeMaxOperator

_ENDS = 'for last; do :; done; [ -z "$0" ] || echo "{\\"ended_by\\": \\"$0\\"}" > "$last"; exit $1'
"""A command that ends so: with the first argument in its summary, and the second as its status."""


@dag(schedule=None, start_date=datetime(2026, 1, 1))
def annotate() -> None:
    labelled = PipeMaxOperator(
        task_id="label",
        command=json.loads(os.environ.get("TRIED_COMMAND", "[]")),
        retries=2,
        retry_delay=timedelta(0),
    )

    @task
    def report(summary: dict) -> None:
        Path(os.environ["TRIED_SUMMARY"]).write_text(json.dumps(summary))

    report(labelled.output)


annotated = annotate()


def run_the_dag() -> None:
    ended = annotated.test()
    assert ended.state == "success", ended.state
    assert {one.task_id: one.try_number for one in ended.get_task_instances()} == {"label": 2, "report": 1}


def try_all_ends() -> None:
    for ended_by, status, kind in (
        ("refused", 2, AirflowFailException),
        ("", 2, AirflowFailException),
        ("error_rows", 1, AirflowFailException),
        ("canary", 4, AirflowFailException),
        ("max_cost", 3, AirflowFailException),
        ("max_cost", 1, AirflowFailException),  # of spark-submit in cluster mode
        ("other_run", 2, AirflowException),
        ("row_count", 2, AirflowException),
        ("failure", 1, AirflowException),
        ("", 137, AirflowException),
    ):
        operator = PipeMaxOperator(task_id="label", command=["sh", "-c", _ENDS, ended_by, str(status)])
        assert type(_error_of(operator)) is kind, (ended_by, status)


def _error_of(operator: PipeMaxOperator) -> Exception | None:
    try:
        operator.execute({})
    except AirflowException as error:
        return error
    return None


if __name__ == "__main__":
    {"job": run_the_dag, "ends": try_all_ends}[sys.argv[1]]()
