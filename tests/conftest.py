"""Hypothesis without deadlines: machines are shared, and no test here is about time."""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("pipemax", deadline=None)
settings.load_profile("pipemax")

# Also where a test has a cache of its own for what engines measure: without what vLLM knows of a model's class, it
# starts a process that imports torch to find it out.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("VLLM_CACHE_ROOT", str(_CACHE / "vllm"))
