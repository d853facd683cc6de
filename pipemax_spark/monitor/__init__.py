"""Everything that a person or MLflow sees of a run: reports of engines, progress, limits, the summary."""
