"""Pictures in the prompt: a tower in front of the model, with a budget and a cache of its own.

    llm = LLM("byte-sees")
    llm.generate({"prompt": "<image>what is this?\n", "multi_modal_data": {"image": picture}})

`inputs` says where a picture stands, `hasher` which pictures are equal, `processor` makes pixels
and placeholders, `vision` and `llava` are the tower and the model behind it,
`encoder_cache_manager` counts, `encoder_runner` holds the rows, `gate` is what the scheduler asks,
`pictures` is what the engine holds. Mirrors `vllm/multimodal/`.
"""
