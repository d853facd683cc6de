"""The controller's state of requests and blocks: one table that writes it, and the indexes that the table keeps."""
