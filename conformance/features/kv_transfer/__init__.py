"""K and V that come from outside: loads, sends, failures, and what the pin does not survive."""
