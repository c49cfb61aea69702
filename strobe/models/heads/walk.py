"""The walk over candidates of drafts, which several heads share."""

MAX_CANDIDATES = 32
"""Candidates of one draft: a warp holds one in each lane."""
