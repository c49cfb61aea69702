"""Tensor parallelism: each rank holds a part of every model and computes a part of each layer.

Layers and families know nothing of it. A rank builds its modules from configs with its part of the
heads and sizes (`split.py`), reads its part of each tensor (`shards.py`), and runs operations that
add up or join the ranks' results (`rank_ops.py`) through a `Group`.
"""
