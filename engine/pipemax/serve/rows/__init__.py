"""A row's way through the server: read, answered from the cache, journalled, suspected, run in its turn."""
