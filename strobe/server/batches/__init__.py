"""Batches of requests that the server answers beside others: OpenAI's and Anthropic's endpoints."""
