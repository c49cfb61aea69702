"""A target and its drafter for text that every Python brings along, trained from nothing."""
