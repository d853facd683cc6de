"""Triton without a GPU, for vLLM's V2 model runner: Python imports this file at start-up where it finds it.

With ``TRITON_INTERPRET=1`` Triton runs kernels in numpy and needs no compiler; but vLLM takes Triton for missing
unless a backend for the device is registered.
"""

import os


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton import backends

    backends.backends.setdefault("cpu", _Backend)
