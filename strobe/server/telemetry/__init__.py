"""Metrics, totals, traces and events of K/V pages, for those who watch the server."""
