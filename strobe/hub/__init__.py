"""Names to directories: the Hugging Face hub, published pairs, speculators checkpoints."""
