"""What users call things, hub names, published pairs and other engines' names of options; and what
lies in the directories that are meant."""
