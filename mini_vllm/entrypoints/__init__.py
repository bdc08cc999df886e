"""Ways in from outside: the command line."""
