"""What vLLM calls when it starts: the entry point of the group `vllm.general_plugins`.

It may be called in several processes and twice in one, and it imports no model code: the name of
the class is enough (`vllm/model_executor/models/registry.py:963` `_ModelRegistry.register_model`).
"""


def register() -> None:
    """Have `ParallelLlamaForCausalLM` in a config.json built by our class."""
    from vllm import ModelRegistry

    name = "ParallelLlamaForCausalLM"
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, f"parallel_llama_model:{name}")
