"""What the simulator plans, beside the real scheduler on the same clock."""
