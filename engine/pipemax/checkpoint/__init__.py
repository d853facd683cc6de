"""What depends on a checkpoint's files: how prompts become its tokens, and how its content is identified."""
