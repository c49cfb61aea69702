"""The command line: `main` reads it, and each command has a file."""
