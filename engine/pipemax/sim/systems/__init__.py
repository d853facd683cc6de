"""The simulated systems, one file per family; each is a policy over the same machine model."""
