"""Text on a terminal: progress, wrapped lines and counted nouns."""
