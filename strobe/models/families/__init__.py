"""Target families, one module each, which reads config.json and makes the model.

A module has `read(fields, directory) -> TargetConfig` and `make(config, max_positions) -> Target`,
and an entry in `FAMILIES` for each of its architectures.
"""

FAMILIES = {
    "Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "Qwen2ForCausalLM": ("qwen2", "qwen2"),
    "LlamaForCausalLM": ("llama", "llama"),
    "MistralForCausalLM": ("mistral", "mistral"),
    "Ministral3ForCausalLM": ("ministral3", "ministral3"),
    "Mistral3ForConditionalGeneration": ("mistral3", "ministral3"),
    "SmolLM3ForCausalLM": ("smollm3", "smollm3"),
    "Phi3ForCausalLM": ("phi3", "phi3"),
    "Gemma4ForCausalLM": ("gemma4_text", "gemma4"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4"),
    "Gemma4UnifiedForCausalLM": ("gemma4_unified_text", "gemma4"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4_unified", "gemma4"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3_moe"),
    "GptOssForCausalLM": ("gpt_oss", "gpt_oss"),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "qwen3_5"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5"),
}
"""Architectures of targets: their model_type, and the module of this package."""
