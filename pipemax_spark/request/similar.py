"""Say which known name a user may have meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the known name that is most like this one, or nothing."""
    plain = {word.replace("-", "_").lower(): word for word in known}
    close = difflib.get_close_matches(name.replace("-", "_").lower(), plain, n=1)
    return f" Did you mean {plain[close[0]]!r}?" if close else ""
