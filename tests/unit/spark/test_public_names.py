"""What ``pipemax_spark`` itself gives: the functions that users call, and nothing heavy before one is asked for."""

import subprocess
import sys

import pytest

import pipemax_spark


@pytest.mark.parametrize("name", ["annotate", "annotate_table", "pipemax_udf", "register", "stop_engines"])
def test_the_package_gives_the_functions_that_users_call(name: str) -> None:
    function = getattr(pipemax_spark, name)
    assert callable(function)
    assert function.__doc__
    assert name in dir(pipemax_spark)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'annotat'"):
        pipemax_spark.annotat  # noqa: B018


def test_importing_the_package_loads_nothing_heavy() -> None:
    program = "import sys, pipemax_spark; print({'pyarrow', 'pyspark', 'rich', 'typer'} & set(sys.modules))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "set()"
