"""K and V from outside: an engine that prefills, one that goes on, and what lies between them.

`base` is the protocol, `gate` what the scheduler asks, `config` what a caller writes. Mirrors
`vllm/distributed/kv_transfer/`.
"""
