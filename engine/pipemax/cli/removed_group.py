"""Refuse removed commands and options with the sentence that names what replaces them."""

from typing import Any

from pipemax.plain_help import PlainGroup
from pipemax.removed import explain_option, removed_command


class RemovedGroup(PlainGroup):
    """A group of commands that knows what was removed from it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (replacement := removed_command(args[0])) is not None:
            ctx.fail(replacement)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            explain_option(error, ctx.invoked_subcommand or "")
            raise
