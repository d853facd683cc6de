"""Take the lengths of a table's prompts, and of an earlier run's outputs, from sampled rows, for a plan.

Parquet files are read by pyarrow, Delta tables by deltalake: neither Spark nor an engine is needed. Lengths of prompts
are those of the rendered template, without a chat template.
"""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset as ds

    from pipemax.domain.workload import LengthStatistics
    from pipemax.sim.workloads import SampledRows

SAMPLED_ROWS = 10_000
_MAX_PARTS = 64
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class TableSource:
    """Where the lengths of a plan's rows come from."""

    table: str
    template: str | None
    tokens_column: str | None
    outputs_of: str | None
    """An earlier run's output table; ``None``: outputs follow statistics."""
    tokenizer_directory: Path | None
    seed: int

    def sampled_rows(self, outputs: "LengthStatistics") -> "tuple[SampledRows, str]":
        """Return the lengths of sampled rows, and a line that says how they were counted."""
        from pipemax.sim.workloads import SampledRows

        prompts = prompt_lengths(
            self.table,
            template=self.template,
            tokens_column=self.tokens_column,
            tokenizer_directory=self.tokenizer_directory,
            seed=self.seed,
        )
        line = f"prompts: {_mean(prompts.tokens):,.0f} tokens on average, {prompts.counted}"
        if self.outputs_of is None:
            rows = SampledRows(prompt_tokens=prompts.tokens, outputs=outputs)
            return rows, f"{line}; outputs: {outputs.mean:,.0f} on average, as --output-mean says"
        earlier = output_lengths(self.outputs_of, seed=self.seed)
        rows = SampledRows(prompt_tokens=prompts.tokens, outputs=earlier.tokens)
        return rows, f"{line}; outputs: {_mean(earlier.tokens):,.0f} on average, {earlier.counted}"


def _mean(tokens: Sequence[int]) -> float:
    return sum(tokens) / len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledLengths:
    """Lengths of sampled rows, in tokens, and how they were counted."""

    tokens: tuple[int, ...]
    counted: str
    """One clause."""


def prompt_lengths(
    table: str,
    *,
    template: str | None,
    tokens_column: str | None,
    tokenizer_directory: Path | None,
    seed: int,
) -> SampledLengths:
    """Return the prompt lengths of up to ``SAMPLED_ROWS`` rows.

    They stand in ``tokens_column``, or are those of the ``template``'s texts, by the directory's ``tokenizer.json``
    or, without one, as a quarter of the characters. ``ValueError`` names a column that the table does not have.
    """
    if (template is None) == (tokens_column is None):
        raise ValueError("--input needs one of --template and --prompt-tokens-column")
    if tokens_column is not None:
        rows = _sampled(table, [tokens_column], seed)
        return SampledLengths(
            tokens=_whole_numbers(table, tokens_column, rows.column(0).to_pylist()),
            counted=f"{rows.num_rows:,} sampled rows of {tokens_column}",
        )
    assert template is not None
    columns = _columns_of(template)
    rows = _sampled(table, columns, seed)
    values = [
        {name: "" if value is None else value for name, value in row.items()} for row in rows.to_pylist()
    ]
    texts = [template.format_map(row) for row in values]
    count, how = _counter(tokenizer_directory)
    tokens = tuple(max(1, count(text)) for text in texts)
    return SampledLengths(tokens=tokens, counted=f"{len(tokens):,} sampled rows, {how}")


def output_lengths(table: str, *, seed: int) -> SampledLengths:
    """Return the lengths of an earlier run's outputs: ``annotation.completion_tokens`` of rows without an error."""
    rows = _sampled(table, ["annotation"], seed)
    annotations = [one for one in rows.column(0).to_pylist() if isinstance(one, dict)]
    tokens = [one.get("completion_tokens") for one in annotations if not one.get("error")]
    lengths = tuple(length for length in tokens if isinstance(length, int) and length > 0)
    if not lengths:
        raise ValueError(f"{table} has no annotation.completion_tokens: give the output table of a run")
    return SampledLengths(tokens=lengths, counted=f"{len(lengths):,} sampled outputs")


def _columns_of(template: str) -> list[str]:
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"--template {template!r}: {error}") from None
    if not fields or not all(name.isidentifier() for name in fields):
        raise ValueError(f"--template {template!r} must name columns in braces, such as {{body}}")
    return sorted(set(fields))


def _counter(directory: Path | None) -> tuple[Callable[[str], int], str]:
    """Return the function that counts a text's tokens, and how it does."""
    file = None if directory is None else directory / "tokenizer.json"
    if file is not None and file.is_file():
        try:
            from tokenizers import Tokenizer
        except ImportError:
            pass
        else:
            tokenizer = Tokenizer.from_file(str(file))
            return lambda text: len(tokenizer.encode(text).ids), f"counted by {file.name}"
    return (
        lambda text: -(-len(text) // _CHARACTERS_PER_TOKEN),
        f"estimated at {_CHARACTERS_PER_TOKEN} characters a token, without a tokenizer.json",
    )


def _whole_numbers(table: str, column: str, values: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(value, int) and value > 0 for value in values):
        raise ValueError(f"column {column} of {table} must hold whole numbers above zero")
    return tuple(values)


def _sampled(table: str, columns: Sequence[str], seed: int) -> "pa.Table":
    """Return up to ``SAMPLED_ROWS`` rows of these columns, from up to ``_MAX_PARTS`` row groups drawn at random."""
    import pyarrow as pa

    dataset = _dataset(table)
    missing = [name for name in columns if name not in dataset.schema.names]
    if missing:
        raise ValueError(
            f"{table} has no column {', '.join(missing)}; it has {', '.join(dataset.schema.names)}"
        )
    rng = random.Random(seed)
    fragments = list(dataset.get_fragments())
    chosen = rng.sample(fragments, min(_MAX_PARTS, len(fragments)))
    groups = [group for fragment in chosen for group in fragment.split_by_row_group()]
    groups = rng.sample(groups, min(_MAX_PARTS, len(groups)))
    parts = []
    for group in groups:
        part = group.to_table(schema=dataset.schema, columns=list(columns))
        wanted = min(part.num_rows, -(-SAMPLED_ROWS // len(groups)))
        parts.append(part.take(sorted(rng.sample(range(part.num_rows), wanted))))
    rows = pa.concat_tables(parts) if parts else None
    if rows is None or not rows.num_rows:
        raise ValueError(f"{table} has no rows")
    return rows.slice(0, SAMPLED_ROWS)


def _dataset(table: str) -> "ds.Dataset":
    """Return a Delta table or Parquet files at a path."""
    import pyarrow.dataset as ds

    path = Path(table)
    if (path / "_delta_log").is_dir():
        try:
            from deltalake import DeltaTable
        except ImportError:
            raise ValueError(
                f"{table} is a Delta table, which deltalake reads: pip install deltalake"
            ) from None
        return DeltaTable(table).to_pyarrow_dataset()
    if not path.exists():
        raise ValueError(f"there is no table {table}: give the path of a Delta table or of Parquet files")
    return ds.dataset(table, format="parquet")
