"""Decide which rows of a table keep a small model's answer, so that few of them differ from the large model's.

A *sampled* row is answered by both models. A row is *kept* if its final answer is the small one. A kept answer that
differs from what the large model would have said is a *miss*; the *budget* is how many misses a table may have. Pure
decisions: no module here knows Spark, an engine or a table.
"""
