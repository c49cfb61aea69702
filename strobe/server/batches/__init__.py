"""Batches of requests, answered together with others: OpenAI's and Anthropic's endpoints."""
