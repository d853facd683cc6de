"""Stand-ins that implement the real interfaces: a fast engine, and the real server around it."""
