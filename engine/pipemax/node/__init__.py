"""The node's resources and processes: GPUs, room for host pools, and how an engine's processes end together."""
