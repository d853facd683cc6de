"""Which rows of the input are left, in which order and pieces they are annotated, and where they wait."""
