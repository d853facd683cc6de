"""Tables and files: reading inputs, committing to the output, and the fence between runs."""
