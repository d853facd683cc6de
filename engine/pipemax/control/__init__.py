"""Pure decisions: which requests run, move and wait. No clock, no randomness, no tensors, no engine."""
