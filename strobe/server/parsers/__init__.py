"""Parsers that split a model's raw answer into reasoning, content and tool calls."""
