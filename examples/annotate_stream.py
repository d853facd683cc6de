"""Annotate a stream: each micro-batch by ``annotate()``, written once whatever is killed and started again.

    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 examples/annotate_stream.py IN OUT CHECKPOINT MODEL

A stream that dies after a batch's write and before the checkpoint knows of it runs that batch again. Delta skips a
write whose version is not above the last one of its application, before anything of it is computed; the application is
the stream's id, which lives in the checkpoint as the batches' numbers do.
"""

import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from pipemax_spark import annotate


def start(spark: SparkSession, source: str, output: str, checkpoint: str, **options: Any) -> StreamingQuery:
    """Start a stream that annotates what ``source`` has now; ``options`` are those of ``annotate()``."""

    def write(rows: DataFrame, batch: int) -> None:
        stream = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert stream, "a micro-batch has its stream's id"
        answered = annotate(rows, **options).write.format("delta").mode("append")
        answered.option("txnAppId", f"annotate {stream}").option("txnVersion", batch).save(output)

    appended = spark.readStream.format("delta").load(source)
    writer = appended.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    return writer.trigger(availableNow=True).start()


if __name__ == "__main__":
    source, output, checkpoint, model = sys.argv[1:]
    session = SparkSession.builder.getOrCreate()
    start(session, source, output, checkpoint, model=model, template="Say {text}").awaitTermination()
