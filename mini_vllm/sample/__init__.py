"""Logits processors: what changes a row of logits before a token is chosen."""
