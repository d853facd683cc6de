"""Read patterns as ECMA-262 does, and write them in the few constructs that all readers take for the same."""
