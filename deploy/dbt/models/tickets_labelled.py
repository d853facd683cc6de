"""A dbt model that annotates rows."""


def model(dbt, session):
    """Annotate the tickets that the table lacks; dbt merges them by their id.

    It runs on a cluster whose executors have the engine, and whose libraries have the wheel (deploy/databricks).
    """
    dbt.config(
        materialized="incremental", incremental_strategy="merge", unique_key="ticket_id", file_format="delta"
    )
    from pipemax_spark import annotate

    tickets = dbt.source("warehouse", "tickets").select("ticket_id", "body")
    if dbt.is_incremental:
        tickets = tickets.join(session.table(f"{dbt.this}"), on="ticket_id", how="left_anti")
    return annotate(
        tickets,
        engine={"model": "/models/your-checkpoint", "max_model_len": 8192},
        engine_python="/opt/pipemax/bin/python",
        template="Summarise in one sentence:\n{body}",
        max_tokens=100,
    )
