"""How the demo models, their tokenizer and their held-out examples are made."""
