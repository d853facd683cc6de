"""A simulator of offline inference on one node, on a virtual clock: no GPU, no vLLM, no wall clock.

It runs the decision core of ``pipemax.control`` and other systems' policies over the same machine model.
"""
