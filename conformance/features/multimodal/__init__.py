"""Pictures in prompts: an encoder's budget per step, its cache, and keys of blocks."""
