"""What PipeMax relies on in vLLM beyond its public interface: versions, private names, and the check of both."""
