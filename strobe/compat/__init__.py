"""Options of vLLM, SGLang and openinfer, translated to Strobe's own."""
