"""What a checkpoint's directory decides: how prompts become its tokens, and by what its content is known."""
