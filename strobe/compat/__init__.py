"""What users of vLLM, SGLang and llama.cpp write, in this engine's own terms."""
