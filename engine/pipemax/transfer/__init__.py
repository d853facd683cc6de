"""KV bytes between a GPU's block pool and the host's: layout, host pool, copies and the rule that orders them.

It sees block ids, never requests, and decides nothing: ``pipemax.vllm_ext`` tells it what to copy in which step.
"""
