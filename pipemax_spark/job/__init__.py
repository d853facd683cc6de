"""The resumable job: what is left of a table, in chunks, committed exactly once."""
