"""What a page says of the runtime before it loads it."""

RUNTIME_BYTES = 17_600_000
"""What the live engine loads, compressed: runtime, numpy, the course, and the model's 6 MB."""
