"""``pipemax doctor --engine FILE``: what the endpoint of an engine config serves and can."""

import os
from pathlib import Path

import typer

from pipemax.config import read_config
from pipemax.endpoint_config import EndpointConfig


def examine_endpoint(file: Path) -> bool:
    """Print a table for each address. Return whether every address can be used.

    ``ValueError`` if the file is no config of an endpoint, or names a key that is not set.
    """
    values = read_config(file)
    if "endpoint" not in values:
        raise ValueError(
            f"engine config {file} names no endpoint, so its engine runs on your machines: pipemax check-node --engine "
            f"{file} checks one of them"
        )
    try:
        config = EndpointConfig.parse(values).with_keys(os.environ)
    except ValueError as error:
        raise ValueError(f"engine config {file}: {error}") from None
    # aiohttp is in the environment of endpoints only.
    from pipemax.endpoints.survey import survey

    seen = survey(config)
    for one in seen:
        typer.echo(f"endpoint {one.name}")
        width = max(map(len, one.found))
        for name, text in one.found.items():
            typer.echo(f"  {name:{width}}  {text}")
    for fault in (one.fault for one in seen if one.fault is not None):
        typer.echo(f"To mend: {fault}")
    is_usable = all(one.fault is None for one in seen)
    if is_usable:
        typer.echo(f"Next: pipemax annotate --engine {file} --help")
    return is_usable
