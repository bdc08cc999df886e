"""A server without a model: the engine's own scheduler on a clock that is computed."""
