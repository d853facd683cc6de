"""What becomes of a row in the server: read, answered from the cache, journalled, suspected, run in its turn."""
