"""Annotate a column within a query: ``pipemax_udf`` for DataFrames, ``register`` for SQL.

Spark decides how often a column is evaluated: twice for ``f(p).text, f(p).error``, for instance. So the engine server
keeps its answers, and a repeated row costs no tokens. ``docs/guide/notebook.md`` shows which query costs what; for
large tables ``annotate()`` or the job are the better tools, because they resume.

Results come in the order of the input. While the engine works on one batch, later batches are read and sent, so that it
never drains between two batches.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from pipemax.wire import PAIR, GenerationSpec
from pipemax_spark.engines.config import engine_config, engine_options
from pipemax_spark.errors import JobError, OnError
from pipemax_spark.executor.client import complete
from pipemax_spark.executor.images import is_image
from pipemax_spark.executor.overrides import check_overrides
from pipemax_spark.executor.requests import request_batch
from pipemax_spark.executor.task import (
    PIECE_ROWS,
    Annotator,
    TaskPlan,
    annotation_type,
    by_piece,
    task_label,
)
from pipemax_spark.request.argument_types import (
    checked_arguments,
    checked_value,
    checks_arguments,
    takes_fields,
)
from pipemax_spark.request.formats import ResponseFormat
from pipemax_spark.request.generation import check_pooling, with_image_settings, with_task
from pipemax_spark.spark.session import current_session
from pipemax_spark.transform import TemplateVariables, checked_spec, generation_spec

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession
    from pyspark.sql._typing import UserDefinedFunctionLike
    from pyspark.sql.types import DataType

_MOST_PIECES_AHEAD = 256
"""Maximum pieces of 256 rows whose answers wait in memory behind a slow row."""
Columns: TypeAlias = "pa.Array | tuple[pa.Array, ...]"
"""The UDF's input from Spark: the column of prompts, or that and those of images and of options."""
ArrayFunction: TypeAlias = "Callable[[Iterator[Columns]], Iterator[pa.Array]]"
"""What a UDF calls: it yields values in the order of its input."""
_ALIASES = {"endpoint": "model", "responseFormat": "response_format"}
"""``ai_query``'s names → ours, for arguments whose value is the same."""


@checks_arguments
@takes_fields(
    GenerationSpec,
    response_format=ResponseFormat,
    chat_template_kwargs=TemplateVariables,
)
def pipemax_udf(
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    on_error: str = "row",
    engine_python: str | None = None,
    log_dir: str | None = None,
    images: bool = False,
    allow_image_urls: Sequence[str] | str = (),
    **generation: Any,
) -> "Callable[..., Column]":
    """Return a function of a column of prompts (string) or conversations (array<struct<role, content>>).

    A further argument may be a struct of the row's own settings, such as max_tokens and temperature, in place of those
    given here; docs/guide/input.md has all. With ``images``, one may be the row's image: bytes, a path,
    a URL whose host is in ``allow_image_urls``, or an array of images; and conversations may have them. With
    ``task="score"`` the two arguments are a query and a document.

    The function returns the same struct as ``annotate()``, and ``generation`` takes the same fields. With a
    ``temperature`` and no ``seed``, the seed is 0: equal rows get equal answers, however often Spark evaluates them. A
    small Spark job checks model, engine and schema at once, on an executor; ``JobError`` says what is wrong. Needs a
    Spark session.
    """
    spark = current_session()
    if spark is None:
        raise JobError("there is no Spark session; create one before you call pipemax_udf")
    return _udf(
        spark,
        model=model,
        engine=engine,
        on_error=on_error,
        engine_python=engine_python,
        log_dir=log_dir,
        images=images,
        allow_image_urls=allow_image_urls,
        **generation,
    )


def _udf(spark: "SparkSession", *, images: bool = False, **options: Any) -> "UserDefinedFunctionLike":
    from pyspark.sql.pandas.types import from_arrow_type

    plan = udf_plan(spark, images=images, **options)
    returned = from_arrow_type(annotation_type(plan.options.generation), prefer_timestamp_ntz=False)
    return spark_function(UdfTask(plan, images), returned)


def udf_plan(
    spark: "SparkSession",
    *,
    model: str | None = None,
    engine: Mapping[str, Any] | None = None,
    on_error: str = "row",
    engine_python: str | None = None,
    log_dir: str | None = None,
    images: bool = False,
    allow_image_urls: Sequence[str] | str = (),
    examples: Mapping[str, GenerationSpec] = MappingProxyType({}),
    **generation: Any,
) -> TaskPlan:
    """Return what the task of a UDF needs, with the arguments of ``pipemax_udf``, once an executor has checked them.

    Raise ``JobError`` if they are wrong. ``examples`` are as in ``checked_spec``, for an endpoint.
    """
    image_config = with_image_settings(
        engine_config(engine, model), has_images=images, allow_urls=allow_image_urls
    )
    config, spec = with_task(image_config, generation_spec(**generation))
    check_pooling(spec, None, images=images)
    if spec.seed is None and spec.temperature > 0:
        spec = replace(spec, seed=0)
    policy = OnError.of(on_error)
    options = engine_options(spark, config, spec, engine_python=engine_python, log_dir=log_dir)
    checked, options = checked_spec(
        spark,
        options,
        source=None,
        has_images=images,
        examples=examples if "endpoint" in config else {},  # other engines can all of them
    )
    if spec.seed is None and not spec.is_pooling:
        # This is for rows with their own temperature. It comes after the hash, which does not depend on the seed of a
        # spec without temperature.
        options = replace(options, generation=replace(spec, seed=0))
    return TaskPlan(
        options=options, spec_hash=checked.hash, run_id=options.job_id, output_column="", on_error=policy
    )


def register(spark: "SparkSession", name: str = "pipemax", **options: Any) -> None:
    """Register ``SELECT name(prompt) …`` with the ``options`` of ``pipemax_udf``.

    ``SELECT name(prompt, named_struct('max_tokens', 50)) …`` gives a row its own options.

    The names of ``ai_query``'s arguments are accepted too: endpoint, responseFormat, failOnError, and modelParameters
    (a dict of max_tokens, temperature, top_p, top_k, stop).
    """
    checked = checked_arguments(pipemax_udf, _without_aliases(options))
    spark.udf.register(name, _udf(spark, **checked))


def _without_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    ours: dict[str, Any] = {}
    for name, value in options.items():
        match name:
            case "modelParameters":
                new = checked_value(name, value, Mapping[str, Any]) or {}
            case "failOnError":
                new = {"on_error": "fail" if value else "row"}
            case _:
                new = {_ALIASES.get(name, name): value}
        if doubled := ours.keys() & new.keys():
            raise JobError(f"{', '.join(sorted(doubled))} is given twice, once as {name}; give it once")
        ours |= new
    return ours


def spark_function(task: ArrayFunction, returned: "DataType") -> "UserDefinedFunctionLike":
    """Return the UDF of a function of arrays, which returns values of the type ``returned``."""
    from pyspark.sql import functions as F  # noqa: N812

    make = _arrow_udf if hasattr(F, "arrow_udf") else _pandas_udf
    made = make(task, returned)
    # Otherwise Spark treats the UDF as free and evaluates it again for every filter and every field.
    return made.asNondeterministic()


def _arrow_udf(task: ArrayFunction, returned: "DataType") -> "UserDefinedFunctionLike":
    """Make the UDF for Spark 4.1 and newer."""
    from pyspark.sql.pandas.functions import arrow_udf

    # Called with two columns, a function with these hints gets pairs.
    def pipemax(batches: Iterator[pa.Array]) -> Iterator[pa.Array]:
        return task(batches)

    # pyspark's stubs want the kind that pyspark reads from the function's hints, and know no Arrow UDF of structs.
    made: UserDefinedFunctionLike = arrow_udf(pipemax, returnType=returned)  # type: ignore[call-overload]
    return made


def _pandas_udf(task: ArrayFunction, returned: "DataType") -> "UserDefinedFunctionLike":
    """Make the UDF for Spark 4.0, which passes Arrow's arrays only by way of pandas."""
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    from pipemax_spark.executor.pandas_bridge import array_of_options, array_of_prompts, pandas_of

    def arrays(batch: pd.Series | tuple[Any, ...]) -> Columns:
        if isinstance(batch, pd.Series):
            return array_of_prompts(batch)
        return array_of_prompts(batch[0]), *map(array_of_options, batch[1:])

    def pipemax(batches: Iterator[pd.Series]) -> Iterator[pd.DataFrame]:
        for values in task(map(arrays, batches)):
            yield pandas_of(values)

    made: UserDefinedFunctionLike = pandas_udf(pipemax, returnType=returned)  # type: ignore[call-overload] # as above
    return made


@dataclass(frozen=True, slots=True)
class UdfTask:
    """The UDF's function: turn prompts, with or without options, into annotations in the same order."""

    plan: TaskPlan
    takes_images: bool = False

    def __call__(self, batches: Iterator[Columns]) -> Iterator[pa.Array]:
        annotator = Annotator(self.plan)
        takes_pairs = self.plan.options.generation.task == "score"
        rows = OrderedRows(batches, takes_images=self.takes_images, takes_pairs=takes_pairs)
        completions = complete(rows.requests(), self.plan.options, task=task_label())
        with contextlib.closing(completions):
            try:
                for batch in completions:
                    rows.put(batch.column("row_id").to_pylist(), annotator.annotations(batch))
                    yield from rows.take()
            finally:
                rows.close()


class OrderedRows:
    """Takes answers in any order and yields them in the input's order, piece by piece."""

    def __init__(
        self, batches: Iterator[Columns], *, takes_images: bool = False, takes_pairs: bool = False
    ) -> None:
        """With ``takes_pairs``, a row is a query and a document."""
        self._batches = batches
        self._columns = _pair_columns if takes_pairs else partial(_request_columns, takes_images=takes_images)
        self._changed = threading.Condition()
        self._num_sent = 0  # pieces
        self._num_taken = 0
        self._is_closed = False
        self._open_rows: dict[int, int] = {}  # piece → rows without an answer
        self._answers: dict[int, list[tuple[list[int], pa.Array]]] = {}  # piece → (places in it, answers)

    def requests(self) -> Iterator[pa.RecordBatch]:
        """Yield batches of REQUEST_SCHEMA, and pause while too many answers wait for their turn.

        The feeder's thread reads them.
        """
        for batch in self._batches:
            columns = self._columns(batch)
            rows = len(next(iter(columns.values())))
            for start in range(0, rows, PIECE_ROWS):
                piece = {name: column.slice(start, PIECE_ROWS) for name, column in columns.items()}
                piece_rows = min(PIECE_ROWS, rows - start)
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._is_closed or self._num_sent - self._num_taken < _MOST_PIECES_AHEAD
                    )
                    if self._is_closed:
                        return
                    number = self._num_sent
                    self._num_sent += 1
                    self._open_rows[number] = piece_rows
                    self._answers[number] = []
                yield request_batch(number * PIECE_ROWS, piece_rows, **piece)

    def put(self, row_ids: Sequence[int], annotations: pa.Array) -> None:
        """Take in the answers to these rows."""
        with self._changed:
            for number, indices in by_piece(row_ids).items():
                answers = annotations.take(pa.array(indices, pa.int32()))
                self._answers[number].append(([row_ids[i] % PIECE_ROWS for i in indices], answers))
                self._open_rows[number] -= len(indices)

    def take(self) -> Iterator[pa.Array]:
        """Yield the next pieces in the input's order, as far as they are complete."""
        while (piece := self._next_piece()) is not None:
            places = [place for part, _ in piece for place in part]
            answers = pa.concat_arrays([array for _, array in piece])
            order = sorted(range(len(places)), key=places.__getitem__)
            yield answers.take(pa.array(order, pa.int32()))

    def close(self) -> None:
        """Stop the reader, even while it waits, because no more rows are needed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next_piece(self) -> list[tuple[list[int], pa.Array]] | None:
        with self._changed:
            number = self._num_taken
            if self._open_rows.get(number) != 0:
                return None
            self._num_taken += 1
            self._changed.notify_all()
            del self._open_rows[number]
            return self._answers.pop(number)


def _pair_columns(arguments: Columns) -> dict[str, pa.Array]:
    """Return the messages of queries and documents. Raise ``JobError`` if these are not two columns of text."""
    columns = arguments if isinstance(arguments, tuple) else (arguments,)
    is_text = [pa.types.is_string(column.type) or pa.types.is_large_string(column.type) for column in columns]
    if is_text != [True, True]:
        raise JobError("the function of the task score takes two columns of text: a query and a document")
    query, document = (column.cast(pa.string()) for column in columns)
    rows = len(query)
    roles = [pa.repeat(pa.scalar(role), rows) for role in PAIR]
    # Message by message: the row's query, then its document.
    order = pa.array([place for row in range(rows) for place in (row, rows + row)], pa.int64())
    turns = pa.StructArray.from_arrays(
        [pa.concat_arrays(roles).take(order), pa.concat_arrays([query, document]).take(order)],
        names=["role", "content"],
    )
    is_null = pc.or_(pc.is_null(query), pc.is_null(document))
    ends = pa.array(range(0, 2 * rows + 1, 2), pa.int32())
    return {"messages": pa.ListArray.from_arrays(ends, turns, mask=is_null)}


def _request_columns(arguments: Columns, *, takes_images: bool = False) -> dict[str, pa.Array]:
    """Return the columns by request field. Raise ``JobError`` for a column that is none of them."""
    prompts, *rest = arguments if isinstance(arguments, tuple) else (arguments,)
    is_text = pa.types.is_string(prompts.type) or pa.types.is_large_string(prompts.type)
    columns = {"prompt" if is_text else "messages": prompts}
    for column in rest:
        name = "images" if takes_images and is_image(column.type) else "overrides"
        if name in columns or (name == "images" and not is_text):
            raise JobError(
                "the function takes prompts and, optionally, a struct of options and (with images=True) images; it was "
                f"given {len(rest) + 1} columns, of the types "
                f"{', '.join(str(column.type) for column in (prompts, *rest))}"
            )
        if name == "overrides":
            check_overrides(column.type)
        columns[name] = column
    return columns
