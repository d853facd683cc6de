"""A wrong argument is told by its own name, whichever function it is given to."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipemax.wire import GenerationSpec
from pipemax_spark.engines.config import engine_config
from pipemax_spark.errors import JobError
from pipemax_spark.functions.udf import pipemax_udf, register
from pipemax_spark.request.argument_types import checked_value
from pipemax_spark.request.questions import read_questions
from pipemax_spark.table import annotate_table, compare_prompts
from pipemax_spark.transform import annotate, generation_spec

DATAFRAME = SimpleNamespace(mapInArrow=None)
SESSION = SimpleNamespace(createDataFrame=None)


class DataFrame:
    """A frame of pandas, by its name."""


def call(function: Callable[..., Any], **given: Any) -> Any:
    first = {
        "annotate": {"df": DATAFRAME},
        "annotate_table": {"spark": SESSION},
        "compare_prompts": {"spark": SESSION, "templates": ["a", "b"]},
    }.get(function.__name__, {})
    return function(**{**first, **given})


FUNCTIONS: tuple[Callable[..., Any], ...] = (annotate_table, annotate, compare_prompts, pipemax_udf)
WRONG: dict[str, tuple[Any, ...]] = {
    "str": (8, 1.5, True, ["x"], {"a": 1}, b"x", object(), DataFrame()),
    "int": ("8", 1.5, True, [8], {}, object()),
    "float": ("0.5", True, [0.5], object()),
    "bool": ("true", 1, 0.0, [True], object()),
    "Sequence[str]": (8, {"a"}, [1], ["a", None], object()),
    "Sequence[int]": ("8", 8, ["a"], [None], [True], object()),
    "Mapping": (8, ["a=b"], [("a", "b")], object()),
}
"""Values of wrong types, by what an argument's declared type begins with."""


def wrong_values(annotation: Any) -> list[Any]:
    """Values that are of none of the types in an annotation."""
    if isinstance(annotation, str):
        return []
    text = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
    text = text.replace("PathLike[str]", "")
    kinds = [kind for kind in WRONG if kind in text and "[" in kind]
    for kind in ("Sequence[str]", "Sequence[int]", "[str"):
        text = text.replace(kind, "")
    kinds += [kind for kind in WRONG if kind in text and "[" not in kind]
    values = [value for kind in kinds for value in WRONG[kind]]
    return [
        value
        for value in values
        # True == 1, and only one of the two is wrong for a "str | bool".
        if all(
            any(value is each or (type(value) is type(each) and value == each) for each in WRONG[kind])
            for kind in kinds
        )
    ]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_of_a_wrong_type_is_told_by_its_name(function: Callable[..., Any]) -> None:
    told = 0
    for name, parameter in inspect.signature(function).parameters.items():
        for value in wrong_values(parameter.annotation):
            with pytest.raises(JobError) as error:
                call(function, **{name: value})
            assert str(error.value).startswith(f"{name} is "), (name, value, str(error.value))
            assert "; give " in str(error.value)
            told += 1
    assert told > 100


@pytest.mark.parametrize("function", [*FUNCTIONS, register])
def test_an_argument_that_does_not_exist_is_told_with_the_one_that_was_meant(
    function: Callable[..., Any],
) -> None:
    more = {"spark": None} if function is register else {}
    for name, meant in (
        ("max_token", "max_tokens"),
        ("responseformat", "response_format"),
        ("Model", "model"),
    ):
        with pytest.raises(TypeError, match=rf"keyword argument '{name}'\. Did you mean '{meant}'\?"):
            call(function, **{name: 1}, **more)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"input": DataFrame()},
            "input is a DataFrame; give the name of a table or a path; annotate() takes a DataFrame",
        ),
        ({"spark": "local"}, "spark is the text 'local'; give a SparkSession"),
        ({"max_tokens": "8"}, "max_tokens is the text '8'; give a whole number"),
        ({"stop": "END"}, "stop is the text 'END'; give a list of texts"),
        ({"choice": "yes"}, "choice is the text 'yes'; give a list of texts"),
        ({"input_option": {"sep": [";"]}}, "input_option['sep'] is a list; give a text"),
        ({"commit_every": 15}, "commit_every is 15; give a timedelta or a text"),
        ({"where": DataFrame}, "where is the class DataFrame; give a text"),
        ({"id_columns": 3}, "id_columns is 3; give a list of texts or a text"),
    ],
)
def test_what_is_to_be_given_is_said(given: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as error:
        call(annotate_table, **given)
    assert str(error.value) == told


def test_a_frame_of_pandas_is_told_how_to_become_one_of_spark() -> None:
    with pytest.raises(
        JobError, match=r"df is a DataFrame; give a Spark DataFrame, such as spark.createDataFrame\(df\)"
    ):
        annotate(DataFrame())  # type: ignore[arg-type]


def test_what_users_also_give_is_taken() -> None:
    for name, given, hint, expected in (
        ("input", Path("/a"), str, "/a"),
        ("max_tokens", np.int64(8), int, 8),
        ("temperature", np.float32(0.5), float, 0.5),
        ("temperature", 1, float, 1),
        ("limit", None, int | None, None),
        ("commit_every", timedelta(1), timedelta | str, timedelta(1)),
        (
            "input_option",
            {"header": True, "maxColumns": 9},
            dict[str, str],
            {"header": "true", "maxColumns": "9"},
        ),
    ):
        hint = (
            inspect.signature(annotate_table).parameters["input_option"].annotation
            if hint == dict[str, str]
            else hint
        )
        taken = checked_value(name, given, hint)
        assert (taken, type(taken)) == (expected, type(expected)), name
    assert generation_spec(max_tokens=None, stop=["a"]) == GenerationSpec(stop=("a",))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_tokens": "8"}, "ask: question 'q': max_tokens is the text '8'; give a whole number"),
        ({"stop": "END"}, "ask: question 'q': stop is the text 'END'; give a list of texts"),
        ({"max_token": 8}, "ask: question 'q' has 'max_token'. Did you mean 'max_tokens'? It may have"),
    ],
)
def test_settings_of_a_question_are_told_too(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as error:
        read_questions({"q": {"template": "?", **settings}}, GenerationSpec())
    assert str(error.value).startswith(told)


def test_a_relative_model_means_the_same_in_all_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "tokenizer", "red"):
        Path(name).mkdir()
    config = engine_config({"tokenizer": "tokenizer", "lora": {"r": "red"}}, "model")
    assert config == {
        "model": str(tmp_path / "model"),
        "tokenizer": str(tmp_path / "tokenizer"),
        "lora": {"r": str(tmp_path / "red")},
    }
    assert engine_config(None, "org/name") == {"model": "org/name"}


def test_what_the_driver_may_not_look_into_is_left_to_the_preflight(tmp_path: Path) -> None:
    """As another user's home; a name that is too long is an error for root as well."""
    hidden = str(tmp_path / ("long" * 100))
    assert engine_config({"lora": {"r": hidden}}, hidden) == {"model": hidden, "lora": {"r": hidden}}


def test_a_cascade_is_refused_by_name_where_there_is_no_table() -> None:
    for function in (annotate, compare_prompts, pipemax_udf):
        with pytest.raises(
            TypeError, match=r"does not take 'cascade': .* use annotate_table\(…, cascade=…\)"
        ):
            call(function, model="m", cascade="small.yaml")
