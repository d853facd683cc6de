"""What the controller knows of requests and blocks: one table that writes, and the indexes that it keeps."""
