"""The resumable job: annotate what is left of a table, in chunks that are each committed exactly once."""
