"""The same requests to vLLM's server and to ours."""
