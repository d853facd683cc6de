"""One file a family of systems; each is a policy over the same machine model."""
