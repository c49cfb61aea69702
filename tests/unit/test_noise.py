"""Gumbel noise against plain Python, and its statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from strobe.sampling.noise import (
    MAX_NOISE,
    NEAR,
    NEAR_HASH,
    Gumbel,
    gumbel,
    gumbel_by_torch,
    noise_key,
    row_words,
)
from tests.support.reference_sampling import exponential, params, row_word, token_hash

COUNT = 40_000
REAL = 151_936
"""Qwen3's vocabulary: five of the chunks that the CPU implementation works on."""


def unsigned(word: int) -> int:
    return word % 2**64


@settings(max_examples=200)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_row_words_equal_splitmix64(key: int, position: int):
    word = row_words(torch.tensor([key]), torch.tensor([position]))
    assert unsigned(word.item()) == row_word(unsigned(key), position)


def close(noise: float, e: float) -> bool:
    """Whether noise is -log(e) up to float32 roundings: a few of its own, and those of v = 1 -
    exp(-e), which matter where e is large and the token loses."""
    return math.isclose(noise, -math.log(e), rel_tol=3e-7, abs_tol=5e-7 + 2**-22 * math.exp(e) / e)


@settings(max_examples=100)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.sampled_from([1, 5, 2048]))
def test_noise_matches_plain_python(key: int, position: int, size: int):
    noise = gumbel(torch.tensor([key]), torch.tensor([position]), size)
    assert (noise.shape, noise.dtype) == ((1, size), torch.float32)
    word = row_word(unsigned(key), position)
    for token in {0, 1, size // 2, size - 1, int(noise.argmax()), int(noise.argmin())} & {
        *range(size)
    }:
        assert close(noise[0, token].item(), exponential(word, token))


def unhash(hashed: int) -> int:
    """Return the input that triple32, with a word of 0, maps to `hashed`."""

    def unshift(x: int, bits: int) -> int:
        unshifted = x
        for _ in range(32 // bits + 1):
            unshifted = x ^ (unshifted >> bits)
        return unshifted

    x = unshift(hashed, 14)
    for factor, bits in ((0x31848BAB, 15), (0xAC4C1B51, 11), (0xED5AD4BB, 17)):
        x = unshift(x * pow(factor, -1, 2**32) % 2**32, bits)
    return x


@pytest.mark.parametrize(
    "hashed", [0, 1, 2, 127, NEAR_HASH - 1, NEAR_HASH, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
)
def test_extreme_noise_is_finite_and_exact(hashed: int):
    """No uniform is 0 or 1, and the smallest keep all their digits."""
    low = unhash(hashed)
    assert token_hash(low, 0) == hashed
    word = torch.tensor([low])
    e = -math.log1p(-(hashed + 0.5) / 2**32)
    for noise in (
        torch.from_numpy(Gumbel(1).noise(word.numpy())),
        gumbel_by_torch(word, torch.zeros(1, dtype=torch.int64)),
    ):
        assert noise.isfinite().all()
        assert close(noise.item(), e)
        assert -3 < noise.item() < MAX_NOISE
        assert noise.item() < NEAR or hashed < NEAR_HASH


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 5.0, 8.0])
@pytest.mark.parametrize("size", [1, 7, 2048, REAL])
def test_race_without_hopeless_tokens_has_the_same_winner(spread: float, size: int):
    scores = spread * torch.randn(9, size, generator=torch.Generator().manual_seed(size))
    scores = (scores - scores.amax(1, keepdim=True)).numpy()
    noise = Gumbel(size)
    words = row_words(torch.arange(9), torch.arange(9)).numpy()
    full = noise.noise(words)
    for row, token in ((0, 0), (3, size // 2), (8, size - 1)):
        alone = noise.at(words[[row]], torch.tensor([token]).numpy())
        assert alone == full[row, token]
    best_noise = noise.at(words, scores.argmax(1))
    assert (noise.race(scores, words, best_noise) == (scores + full).argmax(1)).all()


@pytest.mark.parametrize("size", [1, 7, 2048, REAL])
def test_torch_implementation_gives_the_same_noise(size: int):
    """Only the last digit of a logarithm may differ."""
    keys, positions = torch.arange(5) * 0x61C8864680B583EB, torch.arange(5) * 7
    noise = gumbel_by_torch(row_words(keys, positions), torch.arange(size))
    assert torch.allclose(noise, gumbel(keys, positions, size), rtol=3e-7, atol=5e-7)


@pytest.mark.parametrize("size", [2048, REAL])
def test_noise_depends_only_on_key_position_and_token(size: int):
    keys, positions = torch.arange(40) * -0x61C8864680B583EB, torch.arange(40) % 3
    together = gumbel(keys, positions, size)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel(keys[order], positions[order], size), together[order])
    for row in (0, 17, 39):
        alone = gumbel(keys[row : row + 1], positions[row : row + 1], size)
        assert torch.equal(alone[0], together[row])
    for part in (1, 15, 999, size - 3):
        assert torch.equal(gumbel(keys, positions, part), together[:, :part])
    assert gumbel(keys[:0], positions[:0], size).shape == (0, size)


def uniforms(token: int = 0, **fields: object) -> Tensor:
    """Return exp(-E), uniform, of one token in many rows."""
    rows = params(COUNT, **fields)  # pyright: ignore[reportArgumentType]
    noise = gumbel(rows.key, rows.position, token + 1)[:, token]
    return (-(-noise.double()).exp()).exp()


NEIGHBOURS = {
    "seeds": lambda i: {"seeds": range(i, COUNT + i)},
    "negative seeds": lambda i: {"seeds": range(-i - COUNT, -i)},
    "positions": lambda i: {"seeds": [5] * COUNT, "positions": range(i, COUNT + i)},
    "siblings": lambda i: {"siblings": i},
    "siblings of one seed": lambda i: {"seeds": [5] * COUNT, "siblings": range(i, COUNT + i)},
    "seed and sibling": lambda i: {"seeds": range(i, COUNT + i), "siblings": range(COUNT)},
    "tokens": lambda i: {"token": i},
    "tokens far apart": lambda i: {"token": i * 1024},
}


def check_uniform_and_independent(first: Tensor, second: Tensor) -> None:
    count = len(first)
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / count)
    assert stats.kstest(first.numpy(), "uniform").pvalue > 0.001
    together = (first * 8).long() * 8 + (second * 8).long()
    counts = torch.bincount(together, minlength=64).numpy()
    assert stats.chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_noise_is_uniform_and_independent_between_neighbours(name: str):
    check_uniform_and_independent(uniforms(**NEIGHBOURS[name](0)), uniforms(**NEIGHBOURS[name](1)))


@pytest.mark.parametrize("step", [1, 2, 256, 32768])
def test_noise_of_a_row_is_uniform_and_independent(step: int):
    noise = gumbel(torch.tensor([noise_key(3, 0)]), torch.tensor([11]), REAL)[0].double()
    uniform = (-(-noise).exp()).exp()
    check_uniform_and_independent(uniform[:-step], uniform[step:])


def test_gumbel_argmax_is_uniform():
    """The noise that decides, at a real vocabulary: the minimum of V exponentials is exponential
    with rate V."""
    count = 2_000
    rows = params(count, seeds=[9] * count, positions=range(count))
    best, token = zip(
        *(gumbel(rows.key[i : i + 50], rows.position[i : i + 50], REAL).max(1) for i in
          range(0, count, 50)), strict=True
    )  # fmt: skip
    tokens = torch.cat(token)
    assert stats.chisquare(torch.bincount(tokens % 16, minlength=16).numpy()).pvalue > 0.001
    assert stats.chisquare(torch.bincount(tokens * 16 // REAL, minlength=16)).pvalue > 0.001
    minimum = (-torch.cat(best).double()).exp() * REAL
    assert stats.kstest(minimum.numpy(), "expon").pvalue > 0.001


def test_nearby_seeds_and_siblings_have_distinct_keys():
    keys = {noise_key(seed, sibling) for seed in range(-50, 50) for sibling in range(60)}
    assert len(keys) == 100 * 60
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert noise_key(2**63 - 1, 0) != noise_key(-(2**63), 0)
