"""Grammars: who waits for one, which rows get a mask, what a mask allows."""
