"""Rows of pictures from outside: one process encodes, another decodes.

    LLM("byte-sees", ec_transfer_config={"ec_connector": "ECSocketConnector",
                                         "ec_role": "ec_consumer", "ec_port": 14579})

`base` is the protocol, which `multimodal.gate` and `multimodal.encoder_runner` call. Connectors:
`example` keeps rows in files, as the pin's does, `sockets` asks an encoder process for them, in
messages of `kv_transfer.wire`. `producer` is what an engine computes that only encodes, and
`processes` runs an encoder and a decoder. Mirrors `vllm/distributed/ec_transfer/`.
"""
