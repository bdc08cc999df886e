"""Which captured graph a batch runs."""
