"""Share options, profiles by name and one-line errors between commands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipemax.domain.errors import EngineStartError
from pipemax.domain.specs import KvCacheDtype

if TYPE_CHECKING:
    from pipemax.domain.specs import NodeSpec

USAGE_ERROR = 2
FILE_COLUMNS = 120
"""Width of tables that go to a file or a pipe, which has no width of its own."""

NODE_PANEL, ROWS_PANEL, OUTPUT_PANEL = "Node and model", "Rows", "Output"

NODE_HELP = (
    "A node by its cloud's name (g6.48xlarge, a2-ultragpu-8g, Standard_ND96isr_H100_v5), by its GPUs (8xL4), or a "
    ".yaml file of your own."
)

Model = Annotated[
    str,
    typer.Option(
        rich_help_panel=NODE_PANEL,
        help="A checkpoint's directory, its config.json, or org/name if it is in Hugging Face's cache; or a profile: "
        "llama2-70b, mixtral-8x7b, qwen3-8b, qwen3-32b, qwen3-235b-a22b, gpt-oss-120b, gemma-3-27b, a .yaml file.",
    ),
]
KvDtype = Annotated[
    KvCacheDtype,
    typer.Option(
        "--kv-dtype",
        rich_help_panel=NODE_PANEL,
        help="KV cache: auto (as the model profile says), or FP8, one byte per value.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        rich_help_panel=ROWS_PANEL, help="Seed for drawing lengths; the same seed gives the same figures."
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=NUMBER",
        rich_help_panel=NODE_PANEL,
        help="Change a number in the node profile, such as host_memory_bytes=512e9 or "
        "all_reduce.bus_bytes_per_s=10e9. Repeatable.",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", rich_help_panel=OUTPUT_PANEL, help="Also write the figures to this file as JSON."),
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line and status 2 on the caller's errors; any other error is a bug and shows."""
    try:
        yield
    except (ValueError, OSError, EngineStartError) as error:
        typer.secho(f"pipemax: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(USAGE_ERROR) from error


def changed_node(name: str, changes: Sequence[str]) -> "NodeSpec":
    """Return a node profile with numbers replaced. ``ValueError`` names an invalid change."""
    from pipemax.presets import load_node, override

    values: dict[str, float] = {}
    for change in changes:
        path, _, number = change.partition("=")
        try:
            values[path.strip()] = float(number)
        except ValueError:
            raise ValueError(f"--set {change}: expected NAME=NUMBER, as host_memory_bytes=512e9") from None
    return override(load_node(name), values)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON in UTF-8, with a newline at the end."""
    import json

    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
