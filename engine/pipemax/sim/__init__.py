"""A simulator of offline inference on one node: the decision core of ``pipemax.control`` on a virtual clock,
beside other systems' policies over the same machine model. No GPU, no vLLM, no wall clock."""
