"""What is asked of a model for a row: prompts, formats, settings, questions, and the spec that names all of it."""
