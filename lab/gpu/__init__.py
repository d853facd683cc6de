"""What is run again on one GPU, vLLM included: ``tools/gpu_proof.sh``."""
