"""Measurements that need a GPU, the results kept beside the programs that make them."""
