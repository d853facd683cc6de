"""Refuse an input whose rows are other ones each time they are read: each run would annotate them again.

A job matches rows by what they hold, and reads its input several times, so a value that changes would make a row look
new. The analysed plan shows the expressions that make such values; the optimised one no longer does, because the
present time is a literal there. Spark's own flag ``deterministic`` misses some of them, so they are known by the names
of their classes.

Three things are left out on purpose. What a plan does not show: ``limit`` without an order, ties of ``row_number``, the
order within ``collect_list``. What is the same in each session that is set up alike: time zone, catalog, database. And
the present time in a condition: it decides which rows there are (``where day = current_date()``), not what they hold.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError
from pipemax_spark.request.columns import RequestColumns
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.session import is_connect

if TYPE_CHECKING:
    from py4j.java_gateway import JavaObject
    from pyspark.sql import DataFrame

RANDOM = {
    "AesEncrypt": "aes_encrypt()",  # unless it is given its initialization vector
    "CallMethodViaReflection": "reflect()",
    "InputFileBlockLength": "input_file_block_length()",  # a block's bounds depend on the number of cores
    "InputFileBlockStart": "input_file_block_start()",
    "MonotonicallyIncreasingID": "monotonically_increasing_id()",
    "Rand": "rand()",
    "Randn": "randn()",
    "RandStr": "randstr()",
    "Shuffle": "shuffle()",
    "SparkPartitionID": "spark_partition_id()",
    "Uniform": "uniform()",
    "Uuid": "uuid()",
}
"""Class of an expression with another value each time it is evaluated → how SQL writes it."""
MOMENT = {
    "CurrentBatchTimestamp": "current_timestamp()",
    "CurrentDate": "current_date()",
    "CurrentTime": "current_time()",
    "CurrentTimestamp": "current_timestamp()",
    "CurrentUser": "current_user()",
    "LocalTimestamp": "localtimestamp()",
    "Now": "now()",
}
"""Class of an expression that depends on when or by whom the query is read → how SQL writes it."""
STEADY = frozenset({"InputFileName", "PythonUDTF"})
"""Classes that Spark calls nondeterministic and that are not taken for it: a file keeps its name, and a Python table
function is called so unless its author says otherwise."""
_TIMES_OF_TEXT = frozenset({"Cast", "ParseToDate", "ParseToTimestamp"})
_SPECIAL_TIMES = frozenset({"now", "today", "tomorrow", "yesterday"})
_BY_PLACE = frozenset({"CTERelationRef", "Union", "UnionLoop"})
"""Operators whose columns are those of the operators below, place by place."""
_SELECTING = frozenset({"AsOfJoin", "Deduplicate", "Filter", "Join"})
"""Operators whose expressions decide which rows there are."""
_QUERIES = frozenset(
    {"Exists", "FunctionTableSubqueryArgumentExpression", "LateralSubquery", "ListQuery", "ScalarSubquery"}
)
"""Expressions that hold a query."""
_PASSING = frozenset(
    {
        *_SELECTING,
        *("Aggregate", "CTERelationDef", "Distinct", "GlobalLimit", "LocalLimit", "Project", "Repartition"),
        *("RepartitionByExpression", "Sample", "Sort", "SubqueryAlias", "View", "Window", "WithCTE"),
    }
)
"""Operators without columns but those from below and those that they name."""
_LIMITS = frozenset({"GlobalLimit", "LocalLimit", "Offset", "Tail"})
_REMEDY = "write the view's rows to a table and annotate that"


def check_steady(
    rows: "DataFrame",
    *,
    name: str,
    where: str | None,
    id_columns: Iterable[str],
    requests: RequestColumns,
) -> None:
    """Raise ``JobError`` if the rows of input ``name``, selected by ``where``, do not stay the same.

    With ids, only the ids and what goes into the requests matter. Without ids, a row is matched by all that it holds.
    """
    if is_connect(rows.sparkSession):
        if where is not None:
            _check_predicate(rows, where)
        return
    query = VolatileQuery(rows)
    if where is not None and (expr := query.predicate()) is not None:
        raise _other_rows(where, expr.sql)
    ids = set(id_columns)
    columns = query.columns()
    if not ids:
        for column, expr in columns.items():
            raise JobError(
                f"column {column!r} of input {name!r} is made by {expr.sql}, which gives another value each time the "
                "input is read, so each run would annotate its rows again. Give --id-columns without it, or "
                f"{_REMEDY}"
            )
        if (expr := query.selecting()) is not None:
            raise JobError(
                f"input {name!r} selects its rows by {expr.sql}, so these are other rows each time it is read. Give "
                f"--id-columns, or {_REMEDY}"
            )
        return
    asked = requests.columns_read(rows) if columns else frozenset[str]()
    for column, expr in columns.items():
        if column in ids or column in asked:
            role = "is an id column" if column in ids else "goes into the requests"
            raise JobError(
                f"column {column!r} of input {name!r} {role}, and it is made by {expr.sql}, which gives another value "
                f"each time the input is read. Take another column, or {_REMEDY}"
            )


def _check_predicate(rows: "DataFrame", where: str) -> None:
    """Raise ``JobError`` for a condition that Spark calls nondeterministic: all that a client of Connect can ask."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F  # noqa: N812

    one = rows.sparkSession.range(1).toDF(free_name("__pipemax_one", rows.columns))
    try:
        _ = one.join(rows, F.expr(where)).schema  # the condition of a join may not be
    except AnalysisException as error:
        if error.getCondition() != "INVALID_NON_DETERMINISTIC_EXPRESSIONS":
            return
        by = (error.getMessageParameters() or {}).get("sqlExprs", where)
        raise _other_rows(where, by.strip('"')) from error


def _other_rows(where: str, by: str) -> JobError:
    return JobError(
        f"--where {where!r} selects different rows each time it is evaluated, by {by}, so a rerun could not tell which "
        "rows are left; use --limit, or a condition on the rows' values"
    )


class Volatility(StrEnum):
    """How often a value is another one."""

    RANDOM = "random"
    MOMENT = "moment"


@dataclass(frozen=True, slots=True)
class Volatile:
    """An expression that has another value each time."""

    kind: Volatility
    sql: str


@dataclass(slots=True)
class VolatileQuery:
    """The volatile expressions of a DataFrame's query."""

    _rows: "DataFrame"
    _sources: "dict[int, list[JavaObject]]" = field(default_factory=dict)
    """Id of an attribute that the query makes → the expressions that it is made of."""
    _volatile_by_id: dict[int, frozenset[Volatile]] = field(default_factory=dict)
    _selecting: "list[JavaObject]" = field(default_factory=list)
    """Expressions that decide which rows there are."""
    _plan: "JavaObject" = None
    _ctes: "dict[int, JavaObject]" = field(default_factory=dict)
    _patterns: "list[JavaObject]" = field(default_factory=list)

    def __post_init__(self) -> None:
        jvm: Any = self._rows.sparkSession._jvm
        patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        # A reference to a query by its name is a leaf, whatever the query holds.
        getters = (patterns.CURRENT_LIKE, patterns.CAST, patterns.RUNTIME_REPLACEABLE, patterns.CTE)
        self._patterns = [pattern() for pattern in getters]
        self._plan = self._rows._jdf.queryExecution().analyzed()
        self._read(self._plan, is_limited=False)

    def columns(self) -> dict[str, Volatile]:
        """Return the columns whose value is volatile, each with the first such expression."""
        by_name = {
            str(attribute.name()): self._of_attribute(_id(attribute))
            for attribute in _items(self._plan.output())
        }
        return {name: _first(volatile) for name, volatile in by_name.items() if volatile}

    def selecting(self) -> Volatile | None:
        """Return an expression by which other rows are selected each time, or None."""
        return self._random_in(self._selecting)

    def predicate(self) -> Volatile | None:
        """Return such an expression in the condition of the query's last step, which is a filter."""
        return self._random_in([self._plan.condition()])

    def _random_in(self, expressions: "Sequence[JavaObject]") -> Volatile | None:
        volatile = {
            value for one in expressions for value in self._of(one) if value.kind is Volatility.RANDOM
        }
        return _first(volatile) if volatile else None

    def _read(self, plan: "JavaObject", *, is_limited: bool) -> None:
        """Note what the attributes of this plan are made of, and what selects rows in it."""
        if self._is_plain(plan):
            return
        name = _class(plan)
        expressions, children = _items(plan.expressions()), _items(plan.children())
        if name == "CTERelationDef":
            self._ctes[int(plan.id())] = plan
        is_limited = is_limited or name in _LIMITS
        for child in children:
            self._read(child, is_limited=is_limited and name != "Aggregate")
        for expression in expressions:
            for query in _queries(expression):
                self._read(query, is_limited=False)
        self._selecting += _deciding(plan, name, expressions, is_limited=is_limited)
        self._note_sources(plan, name, expressions, children)

    def _note_sources(
        self,
        plan: "JavaObject",
        name: str,
        expressions: "list[JavaObject]",
        children: "list[JavaObject]",
    ) -> None:
        for named in expressions:
            if _class(named) == "Alias":
                self._sources[_id(named)] = [named.child()]
        if name in _PASSING:
            return
        if name == "CTERelationRef":
            # Definitions come before the plan that refers to them, but for one that refers to itself.
            meant = self._ctes.get(int(plan.cteId()))
            below = [] if meant is None else [_items(meant.output())]
        else:
            below = [_items(child.output()) for child in children]
        known = {_id(named) for outputs in below for named in outputs} | self._sources.keys()
        for place, named in enumerate(_items(plan.output())):
            if _id(named) in known or not below:
                continue
            if name in _BY_PLACE:
                made_of = [outputs[place] for outputs in below]
            elif name == "Generate":
                made_of = [plan.generator()]
            else:  # an operator that shows no more: a function of whole rows, for instance
                made_of = [*expressions, *(part for outputs in below for part in outputs)]
            self._sources[_id(named)] = made_of

    def _is_plain(self, plan: "JavaObject") -> bool:
        """Tell whether a plan can hold nothing volatile: Spark keeps these facts with each node, for all below it."""
        return bool(plan.deterministic()) and not any(map(plan.containsPattern, self._patterns))

    def _of_attribute(self, number: int) -> frozenset[Volatile]:
        if number not in self._volatile_by_id:
            # While it is being looked at: a recursive query names itself.
            self._volatile_by_id[number] = frozenset()
            volatile = (self._of(expression) for expression in self._sources.get(number, ()))
            self._volatile_by_id[number] = frozenset().union(*volatile)
        return self._volatile_by_id[number]

    def _of(self, expression: "JavaObject") -> frozenset[Volatile]:
        """Return the volatile expressions on which the value of this one depends."""
        name = _class(expression)
        if name == "AttributeReference":
            return self._of_attribute(_id(expression))
        if name == "OuterReference":
            return self._of(expression.e())
        parts = _items(expression.children())
        volatile = [self._of(part) for part in parts]
        volatile += [self._of_query(query) for query in _own_query(expression)]
        itself = _volatile_itself(expression, name, parts)
        return frozenset([] if itself is None else [itself]).union(*volatile)

    def _of_query(self, query: "JavaObject") -> frozenset[Volatile]:
        return frozenset[Volatile]().union(
            *(self._of_attribute(_id(attribute)) for attribute in _items(query.output()))
        )


def _deciding(
    plan: "JavaObject", name: str, expressions: "list[JavaObject]", *, is_limited: bool
) -> "list[JavaObject]":
    """Return the expressions of this operator that decide which rows there are."""
    if name in _SELECTING or (name == "Sort" and is_limited):
        return expressions
    if name == "Aggregate":
        return _items(plan.groupingExpressions())
    if name == "Generate":
        return [plan.generator()]
    return (
        [expression for expression in expressions if not _own_query(expression)]
        if name == "LateralJoin"
        else []
    )


def _volatile_itself(expression: "JavaObject", name: str, parts: "list[JavaObject]") -> Volatile | None:
    """Return the expression if it is volatile by itself, whatever its parts are."""
    if name == "AesEncrypt" and not _draws_vector(expression):
        return None
    if name in RANDOM:
        return Volatile(Volatility.RANDOM, RANDOM[name])
    if name in MOMENT:
        return Volatile(Volatility.MOMENT, MOMENT[name])
    if name in _TIMES_OF_TEXT and _class(parts[0]) == "Literal":
        is_time = str(expression.dataType().typeName()) in ("date", "timestamp", "timestamp_ntz")
        if is_time and str(parts[0].value()).strip().lower() in _SPECIAL_TIMES:
            return Volatile(Volatility.MOMENT, str(expression.sql()))
    is_flagged = name not in STEADY and not expression.deterministic()
    if is_flagged and all(part.deterministic() for part in parts) and not _own_query(expression):
        return Volatile(Volatility.RANDOM, str(expression.sql()))
    return None


def _draws_vector(encryption: "JavaObject") -> bool:
    """Tell whether ``aes_encrypt`` draws its initialization vector, so that equal texts become unequal."""
    mode, vector = encryption.mode(), encryption.iv()
    is_ecb = _class(mode) == "Literal" and str(mode.value()).upper() == "ECB"
    return not is_ecb and bool(vector.foldable()) and not vector.eval(None)


def _queries(expression: "JavaObject") -> "Iterator[JavaObject]":
    """Yield the plans of the subqueries in this expression."""
    yield from _own_query(expression)
    for part in _items(expression.children()):
        yield from _queries(part)


def _own_query(expression: "JavaObject") -> "list[JavaObject]":
    name = _class(expression)
    return [expression.plan()] if name in _QUERIES else []


def _first(volatile: "frozenset[Volatile] | set[Volatile]") -> Volatile:
    return min(volatile, key=lambda value: (value.kind is not Volatility.RANDOM, value.sql))


def _class(node: "JavaObject") -> str:
    return str(node.getClass().getSimpleName())


def _id(named: "JavaObject") -> int:
    return int(named.exprId().id())


def _items(sequence: "JavaObject") -> "list[JavaObject]":
    return [sequence.apply(place) for place in range(sequence.size())]
