"""Experts: routing, placement, balance."""
