"""Tests of Strobe. What several files need is in `support` and `server/support`."""
