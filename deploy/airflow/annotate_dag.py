"""Every night: annotate the tickets that came, and say how many there were."""

from datetime import datetime, timedelta

from airflow.sdk import dag, task
from pipemax_operator import PipeMaxOperator


@dag(schedule="0 2 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1)
def annotate_tickets() -> None:
    """Every night at two."""
    labelled = PipeMaxOperator(
        task_id="label",
        command=[
            "/opt/pipemax/bin/pipemax-annotate",
            *("--input", "warehouse.tickets", "--output", "warehouse.tickets_labelled"),
            *(
                "--id-columns",
                "ticket_id",
                "--template",
                "Summarise in one sentence:\n{body}",
                "--max-tokens",
                "100",
            ),
            *(
                "--engine",
                "/etc/pipemax/engine.yaml",
                "--incremental",
                "--max-cost",
                "200",
                "--price-per-hour",
                "12",
            ),
        ],
        retries=3,
        retry_delay=timedelta(minutes=5),
    )

    @task
    def report(summary: dict) -> None:
        print(f"{summary['rows_out']:,} rows annotated; the report is {summary['report']}")

    report(labelled.output)


annotate_tickets()
