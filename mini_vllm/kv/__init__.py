"""Several block tables per request: layers that see everything beside layers that see a window."""
