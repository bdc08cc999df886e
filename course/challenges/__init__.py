"""Challenges: a contract, a starter that works, and a score that is counted.

Each has a folder with `starter.py` (the contract is its docstring), `meter.py` (draws workloads,
asks an answer, counts) and `reference.py` (reaches every mark). `judge.py` keeps the meter and the
workloads in one process and the answer in another.
"""
