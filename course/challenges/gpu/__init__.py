"""Two challenges for owners of a GPU: a kernel and a tile, raced against the pinned ones.

These two are clocked, unlike the others: their score is a ratio of times, taken in one process, in
pairs. `pinned.py` loads vLLM's own Triton kernels from the pinned tree, so no vLLM need be
installed; `race.py` is the meter and runs where torch, Triton and a CUDA device are.
"""
