"""The annotation job as a script: ``spark-submit jobs/annotate.py --help``."""

from pipemax_spark.cli import app

app(prog_name="annotate")
