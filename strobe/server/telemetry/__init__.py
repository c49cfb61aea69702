"""Metrics, totals, traces and events of K/V pages, to monitor the server."""
