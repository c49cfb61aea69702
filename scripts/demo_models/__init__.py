"""Scripts that make the demo models, their tokenizer and their held-out examples."""
