"""The decisions of one step, each made from the present state: phase, prefill, decode, prefetch, and evictions."""
