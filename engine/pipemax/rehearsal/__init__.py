"""A node whose GPUs only take time: the simulator's machine model, driven by a real engine step by step.

Nothing is computed and no KV is kept. It knows nothing of vLLM: ``pipemax.vllm_ext.rehearsal`` connects the two.
"""
