"""Ranks, stages and replicas."""
