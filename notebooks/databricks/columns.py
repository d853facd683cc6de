# Databricks notebook source
# MAGIC %md
# MAGIC # The model as a column
# MAGIC
# MAGIC `pipemax_udf` makes a model a function of a column, `register` makes it a function in SQL, and `annotate()` adds its answers to a DataFrame:
# MAGIC here with a prompt, with a JSON schema, and as an embedding. For a large table take the resumable job (annotate.ipynb): these commit nothing,
# MAGIC and a failed query starts again. On a GPU node, or on Databricks (docs/deploy/databricks.md), change the next cell only.

# COMMAND ----------

from pathlib import Path

repository = Path.cwd().parent if Path.cwd().name == "notebooks" else Path.cwd()
engine = {
    "model": str(repository / "examples" / "model"),
    "max_model_len": 512,
    "max_num_seqs": 64,
    "cpu_kv_gib": 0.5,
    "json_whitespace": "any",  # the demo model has learned JSON with a space behind colons
}
embedder = {"model": engine["model"], "max_model_len": 512, "task": "embed"}
engine_python = None  # the Python of the engine's environment, where it is not this one
packages = str(repository / "examples" / "data" / "debian_packages.parquet")
num_rows = 100

# COMMAND ----------

from pyspark.sql import functions as F  # noqa: N812

from pipemax_spark.spark.session import get_session

spark = get_session("columns", log_dir=repository / "logs")
rows = spark.read.parquet(packages).orderBy(F.xxhash64("package")).limit(num_rows).cache()
prompt = F.format_string("Package: %s\nSummary: %s\nDescription: %s", "package", "summary", "description")
rows.select("package", "section", "summary").show(3, truncate=70)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A prompt
# MAGIC
# MAGIC The function takes a column of prompts and returns a struct: the text, the counts of tokens, the error. The demo model was trained to answer one
# MAGIC question, in which section of the archive a package is; a model of yours answers what you ask.

# COMMAND ----------

from pipemax_spark import pipemax_udf

ask = pipemax_udf(engine=engine, engine_python=engine_python, max_tokens=24)
asked = rows.select("package", ask(prompt).alias("a"))
answers = asked.select("package", "a.text", "a.completion_tokens", "a.error").cache()
answers.show(3, truncate=60)

# COMMAND ----------

# MAGIC %md
# MAGIC ## A schema
# MAGIC
# MAGIC With a schema every answer is JSON of this form, and `annotation.parsed` is a typed struct. `annotate()` builds the prompt from a template.

# COMMAND ----------

from pipemax_spark import annotate

labelled = annotate(
    rows,
    engine=engine,
    engine_python=engine_python,
    template="Package: {package}\nSummary: {summary}\nDescription: {description}",
    response_format=(repository / "examples" / "section.schema.json").read_text(),
    max_tokens=24,
).cache()
right = F.avg(F.expr("int(annotation.parsed.section = section)"))
labelled.agg(
    F.count("*").alias("rows"), F.count("annotation.error").alias("errors"), right.alias("right")
).show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## In SQL
# MAGIC
# MAGIC The function has a name in this session. The second argument sets options for the row.

# COMMAND ----------

from pipemax_spark import register

register(spark, "section_of", engine=engine, engine_python=engine_python, max_tokens=24)
rows.withColumn("prompt", prompt).createOrReplaceTempView("packages")
in_sql = spark.sql(
    """
    SELECT package, section_of(prompt).text AS text,
           section_of(prompt, named_struct('max_tokens', 3)).finish_reason AS cut_at_three_tokens
    FROM packages LIMIT 5
    """
).cache()
in_sql.show(truncate=60)

# COMMAND ----------

# MAGIC %md
# MAGIC ## An embedding
# MAGIC
# MAGIC Another engine config is another engine: it replaces the first one on the executor, once no query uses that. The demo model is no embedding model, so
# MAGIC its vectors mean little; the form is the same for one that is.

# COMMAND ----------

embed = pipemax_udf(engine=embedder, engine_python=engine_python)
vectors = rows.select("package", embed("summary").embedding.alias("embedding")).cache()
size, start = F.size("embedding").alias("dimensions"), F.slice("embedding", 1, 3).alias("first three")
vectors.select("package", size, start).show(3, truncate=60)

# COMMAND ----------

import matplotlib.pyplot as plt
import numpy as np

table = vectors.toPandas()
matrix = np.stack(table["embedding"].to_list())
matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
similarities = matrix @ matrix.T
figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
image = axes.imshow(similarities, cmap="viridis")
figure.colorbar(image, label="cosine similarity")
axes.set(title=f"{len(table)} summaries, each with each", xlabel="row", ylabel="row")
plt.show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## The end
# MAGIC
# MAGIC The engine stays for the next query until 30 minutes have passed without one. This stops it at once and frees its GPUs.

# COMMAND ----------

from pipemax_spark import stop_engines

stop_engines(spark)
