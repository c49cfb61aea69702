"""The OpenAI API: requests, answers and event streams of each endpoint."""
