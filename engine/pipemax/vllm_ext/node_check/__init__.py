"""The proof that an engine under PipeMax is right on this machine: its copies, its tokens, its overlap."""
