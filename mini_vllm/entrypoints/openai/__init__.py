"""An OpenAI-compatible server over the engine: `mini-vllm serve`; needs the extra `serve`."""
