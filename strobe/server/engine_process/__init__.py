"""The engine in a process of its own: messages, the worker there, the client here."""
