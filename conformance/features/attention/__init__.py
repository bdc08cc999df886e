"""Which attention backend is chosen, and what one computes."""
