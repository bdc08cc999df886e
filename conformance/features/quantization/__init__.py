"""Layouts of packed weights."""
