"""Watching an engine without changing it: traces, measurements."""
