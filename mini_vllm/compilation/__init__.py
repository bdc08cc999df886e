"""Which CUDA graph each step would run on, and the padding that makes it fit one."""
