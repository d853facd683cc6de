"""One pipeline stage with real shapes and dummy weights, for ``lab/bench/transfer.py``."""
