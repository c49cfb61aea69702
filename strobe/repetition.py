"""Finds the token with which an answer has repeated itself too often. Imports no torch."""

from __future__ import annotations

from strobe.sampling_params import RepetitionDetection


class RepetitionDetector:
    """Reads an answer token by token and tells whether it ends in a repeated pattern.

    The answer ends in `min_count` copies of a pattern of `size` tokens if each of the newest
    size * (min_count - 1) tokens equals the one `size` places before it. A token that does not
    rules this out until so many tokens follow it, and only then is this size compared again. So no
    token is compared twice for a size, and few are compared at all: about one per token of the
    answer for 8 copies of up to 256 tokens.
    """

    def __init__(self, settings: RepetitionDetection, *, min_tokens: int = 0):
        """min_tokens: no repetition is reported before the answer has this many tokens."""
        self._min_count = settings.min_count
        self._min_size = max(settings.min_pattern_size, 1)
        self._max_size = settings.max_pattern_size
        self._min_tokens = min_tokens
        self._tokens: list[int] = []
        self._sizes_at: dict[int, list[int]] = {}
        """Pattern sizes to compare once the answer has that many tokens."""

    def push(self, token: int) -> bool:
        """Add the answer's next token; return whether the answer ends in a repeated pattern."""
        self._tokens.append(token)
        length = len(self._tokens)
        sizes = self._sizes_at.pop(length, [])
        size, rest = divmod(length, self._min_count)
        if not rest and self._min_size <= size <= self._max_size:
            sizes.append(size)
        for size in sizes:
            needed = size * (self._min_count - 1)
            num_equal = self._count_equal(size, needed)
            if num_equal < needed:
                following = length - num_equal + needed
            elif length < self._min_tokens:
                following = self._min_tokens
            else:
                return True
            self._sizes_at.setdefault(following, []).append(size)
        return False

    def _count_equal(self, size: int, limit: int) -> int:
        """Return how many of the newest tokens equal the one `size` places before, up to a
        limit."""
        tokens = self._tokens
        last = len(tokens) - 1
        for count in range(limit):
            if tokens[last - count] != tokens[last - count - size]:
                return count
        return limit
