"""One pipeline stage with real shapes and dummy weights: what ``bench/transfer.py`` and ``bench/one_stage.py`` run."""
