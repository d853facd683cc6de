"""What users call is there under its name, whatever was imported before."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil
import pipemax_spark
modules = [found.name for found in pkgutil.walk_packages(pipemax_spark.__path__, "pipemax_spark.")]
for name in modules:
    importlib.import_module(name)
assert len(modules) > 80, modules
from pipemax_spark import annotate, annotate_table, compare_prompts, pipemax_udf, pm_classify, pm_extract
from pipemax_spark import register, register_functions, stop_engines
for function in (annotate, annotate_table, compare_prompts, pipemax_udf, pm_classify, pm_extract, register,
    register_functions, stop_engines):
    assert callable(function), function
"""


def test_no_module_takes_the_name_of_a_function() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_holds_five_modules() -> None:
    import pkgutil

    import pipemax_spark

    modules = [found.name for found in pkgutil.iter_modules(pipemax_spark.__path__) if not found.ispkg]
    assert sorted(modules) == ["cli", "errors", "options", "table", "transform"]
