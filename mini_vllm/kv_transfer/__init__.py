"""K and V from outside: an engine that prefills, one that goes on, and what lies between them.

    LLM(kv_transfer_config={"kv_connector": "SocketConnector", "kv_role": "kv_consumer"})

`base` is the protocol, `gate` what the scheduler asks, `transfer` what the engine holds.
Connectors: `pull` is one whose consumer reads, over `sockets` or a `simulated` network, in messages
of `wire`, between the two ends of `transfers`; `example` keeps prompts in files; `offload` moves
blocks to host memory and disk. `processes` runs a producer and a consumer. `events` are an engine's
changes of its prefix index, and `router` chooses an engine by them. Mirrors
`vllm/distributed/kv_transfer/`.
"""
