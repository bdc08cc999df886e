"""vLLM whole, on the shipped model."""
