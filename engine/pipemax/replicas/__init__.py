"""Several engines behind the interface of one: each replica is a process with GPUs and cores of its own."""
