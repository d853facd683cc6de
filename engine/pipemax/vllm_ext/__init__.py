"""vLLM behind one seam: the only package of this project that imports it."""
