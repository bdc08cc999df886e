"""Adapters, and who waits for a slot."""
