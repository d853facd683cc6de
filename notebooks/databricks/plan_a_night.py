# Databricks notebook source
# MAGIC %md
# MAGIC # Planning a night
# MAGIC
# MAGIC Which node, how many of them, what does it cost? `pipemax plan-capacity` simulates a sample of the rows under every layout of
# MAGIC each kind of node, with stock vLLM and with PipeMax. The figures come from profiles of GPUs and models; no GPU has confirmed
# MAGIC them yet.

# COMMAND ----------

rows = 10_000_000
prompt_mean, prompt_median = 500, 400  # tokens; count yours with `pipemax annotate … --dry-run`
model = "qwen3-32b"  # or a checkpoint's directory, its config.json, or org/name
nodes = {"2xL20": 4.0, "2xRTX-PRO-6000-Server": 6.0}  # kind of node: price per hour
hours_left = 120.0
start_up_hours = 0.2  # weights and calibration

# COMMAND ----------

# MAGIC %md
# MAGIC ## Every option

# COMMAND ----------

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd

command = [
    sys.executable,
    "-m",
    "pipemax",
    "plan-capacity",
    "--rows",
    str(rows),
    "--model",
    model,
]
command += [
    "--prompt-mean",
    str(prompt_mean),
    "--prompt-median",
    str(prompt_median),
    "--json",
    "logs/options.json",
]
for name, price in nodes.items():
    command += ["--node", name, "--price", str(price)]
subprocess.run(command, check=True, capture_output=True)
table = pd.DataFrame(json.loads(Path("logs/options.json").read_text()))
columns = [
    "node",
    "replicas",
    "tensor_parallel",
    "pipeline_parallel",
    "policy",
    "chunk_tokens",
    "tokens_per_s",
]
table.sort_values("cost")[[*columns, "hours", "cost", "limited_by", "chosen"]].head(12)

# COMMAND ----------

# MAGIC %md
# MAGIC ## Hours against cost
# MAGIC
# MAGIC Each point is one way to run the table on one node. The chosen one is marked.

# COMMAND ----------

import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (node, policy), group in table.groupby(["node", "policy"]):
    axes.scatter(group["hours"], group["cost"], label=f"{node}, {policy}", s=30)
chosen = table[table["chosen"]]
axes.scatter(chosen["hours"], chosen["cost"], s=160, facecolors="none", edgecolors="black", label="chosen")
axes.set(xlabel="hours on one node", ylabel="cost")
axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()

# COMMAND ----------

# MAGIC %md
# MAGIC ## How many nodes
# MAGIC
# MAGIC Rows go to each node as fast as it does them, so N nodes take the hours of one divided by N, and their start-up.

# COMMAND ----------

import math

best = chosen.sort_values("cost").iloc[0]
count = math.ceil(best["hours"] / (hours_left - start_up_hours))
hours = best["hours"] / count + start_up_hours
cost = count * hours * best["cost"] / best["hours"]
plan = {"node": best["node"], "nodes": count, "hours": round(hours, 2), "cost": round(cost)}
pd.Series(plan, name="plan").to_frame()
