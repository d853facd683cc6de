"""KV copies on CUDA: streams instead of a copy thread's queue, events instead of waiting.

``device`` is the seam to the hardware; all decisions about order are made above it, so that a machine without a GPU
can prove them right (``tests/fakes/recording_device.py``).
"""
