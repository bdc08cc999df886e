"""Groups of layers that keep different things."""
