"""Grammars of structured output in llguidance's form, and a process that tries new ones out."""
