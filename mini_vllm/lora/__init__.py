"""Multi-LoRA: many adapters of one model served in one batch.

    LLM(enable_lora=True, max_loras=4)
    llm.generate(prompts, lora_request=[None, LoRARequest("shout", 1, "models/adapters/shout")])

`request` names an adapter, `config` has the knobs, `weights` reads PEFT folders, `slots` is the LRU
cache of what is ready to compute, `layers` adds the deltas, on tensor ranks `ranks` does, `gate` is
what the scheduler asks, `adapters` is what the engine holds. Mirrors `vllm/lora/`.
"""
