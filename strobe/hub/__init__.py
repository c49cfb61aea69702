"""Resolve model names to directories: the Hugging Face hub, published pairs, speculators."""
