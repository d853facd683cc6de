"""Rows of a table, drawn at random, and their lengths as a workload.

Prompts are counted with the engine's tokenizer and chat template, or read from a column. Output lengths are read from
a column, or drawn from a profile's statistics as ``pipemax plan-capacity`` draws them.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipemax.checkpoint.prompt_encoder import PromptEncoder, shared_prefix_tokens
from pipemax.domain.workload import LengthStatistics
from pipemax.generation import GenerationRequest, RequestError, Sampling
from pipemax.policy.table_files import table_files
from pipemax.sim.workloads import Workload, draw_outputs

_READ_WHOLE = 100_000
_ROW_GROUPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """Rows drawn from a table."""

    columns: pa.Table
    num_rows_of_table: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where a row's prompt is: exactly one of the three is set."""

    column: str | None = None
    template: str | None = None
    """A text with ``{column}`` in it."""
    tokens_column: str | None = None
    """A column of prompt lengths, instead of prompts."""

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.column, self.template, self.tokens_column)) != 1:
            raise ValueError(
                "a table needs exactly one of --prompt-column, --template and --prompt-tokens-column"
            )
        if self.template is not None and not self.columns:
            raise ValueError(f"template {self.template!r} names no column; write {{column}}")

    @property
    def columns(self) -> list[str]:
        """The columns that it reads."""
        if self.template is None:
            return [self.column or self.tokens_column or ""]
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None]
        except ValueError as error:
            raise ValueError(f"template {self.template!r}: {error}") from error
        return list(dict.fromkeys(names))

    def prompt(self, row: Mapping[str, Any]) -> str | None:
        """Return a row's prompt; None, as in a job, if a column of it is null."""
        if self.template is None:
            value = row[self.column or ""]
            return None if value is None else str(value)
        if any(row[name] is None for name in self.columns):
            return None
        return "".join(
            literal + ("" if name is None else str(row[name]))
            for literal, name, _, _ in string.Formatter().parse(self.template)
        )


def sample_rows(path: Path, columns: Sequence[str], num_rows: int, *, seed: int = 0) -> SampledRows:
    """Draw rows from a Parquet or Delta table, without duplicates.

    From more than 100,000 rows they come from 32 row groups at most, drawn by their numbers of rows. ``ValueError``
    names a missing column or a table that cannot be read.
    """
    rng = np.random.default_rng(seed)
    try:
        files = [pq.ParquetFile(file) for file in table_files(path)]
    except pa.ArrowInvalid as error:
        raise ValueError(f"the table at {path} cannot be read: {error}") from error
    names = files[0].schema_arrow.names
    if missing := [column for column in columns if column not in names]:
        raise ValueError(
            f"the table at {path} has no column {', '.join(missing)}; there are {', '.join(names)}"
        )
    groups = [(file, group) for file in files for group in range(file.num_row_groups)]
    sizes = np.array([file.metadata.row_group(group).num_rows for file, group in groups], dtype=np.int64)
    total = int(sizes.sum())
    if total == 0:
        raise ValueError(f"the table at {path} has no rows")
    if total > _READ_WHOLE and len(groups) > _ROW_GROUPS:
        chosen = rng.choice(len(groups), _ROW_GROUPS, replace=False, p=sizes / total)
        groups = [groups[index] for index in chosen]
    read = pa.concat_tables([file.read_row_group(group, columns=list(columns)) for file, group in groups])
    rows = rng.permutation(read.num_rows)[:num_rows]
    return SampledRows(columns=read.take(pa.array(rows)), num_rows_of_table=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPrompts:
    """The prompts of the sampled rows that a job would run."""

    rows: pa.Table
    """These rows only."""
    tokens: npt.NDArray[np.int64]
    shared_prefix_tokens: int
    """Leading tokens that all of them have in common; 0 where lengths were read from a column."""


def count_prompts(
    rows: pa.Table,
    source: PromptSource,
    encoder: PromptEncoder | None,
    *,
    system: str | None,
    max_model_len: int,
) -> CountedPrompts:
    """Count the rows' prompts with ``encoder``, or read their lengths from a column, for which it may be None.

    Rows without a prompt, or with one that leaves no token of ``max_model_len``, are left out: a job makes error rows
    of them. ``ValueError`` if no row is left.
    """
    shared = 0
    if source.tokens_column is not None:
        lengths: list[int | None] = _integers(rows, source.tokens_column)
    else:
        assert encoder is not None, "prompts are counted with a tokenizer"
        sampling = Sampling(max_tokens=1)
        requests = [
            GenerationRequest(
                request_id=str(number), prompt=source.prompt(row), system=system, sampling=sampling
            )
            for number, row in enumerate(rows.to_pylist())
        ]
        encoded = encoder.encode(requests)
        shared = shared_prefix_tokens([ids for ids in encoded if not isinstance(ids, RequestError)])
        lengths = [None if isinstance(ids, RequestError) else len(ids) for ids in encoded]
    kept = [number for number, length in enumerate(lengths) if length and 0 < length < max_model_len]
    if not kept:
        raise ValueError(
            f"none of the {len(lengths):,} sampled rows has a prompt below {max_model_len:,} tokens"
        )
    tokens = np.array([lengths[number] for number in kept], dtype=np.int64)
    return CountedPrompts(
        rows=rows.take(pa.array(kept)),
        tokens=tokens,
        shared_prefix_tokens=min(shared, int(tokens.min()) - 1),
    )


def read_outputs(rows: pa.Table, column: str) -> npt.NDArray[np.int64]:
    """Return recorded output lengths. ``ValueError`` unless each is at least 1."""
    lengths = _integers(rows, column)
    if any(length is None or length < 1 for length in lengths):
        raise ValueError(f"column {column!r} has output lengths that are null or below 1")
    return np.array(lengths, dtype=np.int64)


def drawn_outputs(
    prompts: npt.NDArray[np.int64], statistics: LengthStatistics, *, max_model_len: int, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Draw output lengths with these statistics, so that prompt and output fit into ``max_model_len``."""
    most = np.minimum(statistics.most, max_model_len - prompts)
    return draw_outputs(statistics, most, np.random.default_rng(seed))


def as_workload(
    name: str, prompts: CountedPrompts, outputs: npt.NDArray[np.int64], max_model_len: int
) -> Workload:
    """Return the rows as a workload; as in a job, an output ends where ``max_model_len`` does."""
    return Workload(
        name=name,
        prompt_tokens=prompts.tokens,
        output_tokens=np.minimum(outputs, max_model_len - prompts.tokens),
        shared_prefix_tokens=prompts.shared_prefix_tokens,
    )


def _integers(rows: pa.Table, column: str) -> list[int | None]:
    values = rows.column(column)
    if not pa.types.is_integer(values.type):
        raise ValueError(f"column {column!r} is of type {values.type}, not of integers")
    lengths: list[int | None] = values.to_pylist()
    return lengths
