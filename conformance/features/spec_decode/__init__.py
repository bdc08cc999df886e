"""Drafts: planned, verified, trimmed and rejected."""
