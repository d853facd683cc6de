"""The versions of vLLM that policy pipemax runs on; importing this loads nothing of vLLM."""

SUPPORTED_VERSIONS = ("0.32.0", "0.33.0")
"""Tokens are compared with stock vLLM's under 0.32.0, of which there is a build for CPUs."""
