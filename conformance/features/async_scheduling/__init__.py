"""Steps planned before the tokens of the last one are known."""
