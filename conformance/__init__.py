"""Recordings of the real vLLM v0.22.1, and the replay of the mini engine against them."""
