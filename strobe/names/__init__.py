"""What users call things: hub names, published pairs, and other engines' names of options."""
