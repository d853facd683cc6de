"""Code that runs in a Spark task or on an executor: feeding the engine server, spooling, parsing answers."""
