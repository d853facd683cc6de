"""Show a run to people and to MLflow: reports of engines, progress, limits and the summary."""
