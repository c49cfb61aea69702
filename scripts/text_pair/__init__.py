"""A target and its drafter, trained from scratch on text that comes with every Python."""
