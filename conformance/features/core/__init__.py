"""The scheduler, its KV cache and what ends a request."""
