"""vLLM's real engine core over a virtual node (``pipemax.rehearsal``): no model, no KV, nothing computed.

Nothing else in the engine imports it.
"""
