"""Grammars of structured output in llguidance's form, tried out in a process of their own."""
