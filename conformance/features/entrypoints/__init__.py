"""What stands between the engine and its caller."""
