"""Engines of several ranks, one process each.

The first rank is an ordinary engine in the caller's process, which also starts, watches and stops
the others. It sends them every plan before it runs it. They run the same plans on their parts of
the models and report nothing, since every rank computes the same tokens.
"""
