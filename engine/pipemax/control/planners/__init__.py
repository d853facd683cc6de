"""Pure choices, each from the state as it is: phase, prefill, decode, prefetch, and who leaves the GPU."""
