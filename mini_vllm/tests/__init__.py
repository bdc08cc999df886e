"""Tests of the engine, and what they share (`support.py`). Needs pytest."""
