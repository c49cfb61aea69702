"""Scripts that make what ships with Strobe; tests import from them, too."""
