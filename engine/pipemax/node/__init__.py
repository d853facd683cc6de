"""What the node has, and who runs on it: GPUs, room for host pools, processes and how they end together."""
