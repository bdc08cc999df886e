"""The challenge of this name."""
