"""The functions of the code family: wordings, plans and bodies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One function: the ways to say what it does (the first one is canonical, the last one held
    out), its plan and its body.

    `{a}` is the first parameter, `{b}` the second, `{k}` a constant between 2 and 9.
    """

    name: str
    takes: str
    does: str
    plan: str
    body: str


_LISTS = (([3, 4, 6],), ([7, 2, 9, 12, 5],), ([-4, 8, 1, 0, 15],), ([20, 5, -3, 10],), ([2],))
_TEXTS = (("river stone",), ("level",), ("The Green Tree",), ("banana",), ("a cat and a dog",))
_NUMBERS = ((3,), (6,), (1,), (10,), (7,))
_PAIRS = ((3, 8), (9, 4), (5, 5), (-2, 7), (12, 6))
INPUTS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "list": _LISTS,
    "text": _TEXTS,
    "number": _NUMBERS,
    "pair": _PAIRS,
}
PARAMETERS = {
    "list": ("numbers", "values", "items", "data"),
    "text": ("text", "sentence", "line", "message"),
    "number": ("number", "value", "x", "amount"),
    "pair": ("a, b", "x, y", "first, second", "left, right"),
}

_FILTERS = {
    "even": ("n % 2 == 0", "the even numbers", "all even numbers"),
    "odd": ("n % 2 == 1", "the odd numbers", "all odd numbers"),
    "positive": ("n > 0", "the positive numbers", "all numbers above zero"),
    "negative": ("n < 0", "the negative numbers", "all numbers below zero"),
    "above": ("n > {k}", "the numbers greater than {k}", "all numbers above {k}"),
    "below": ("n < {k}", "the numbers less than {k}", "all numbers below {k}"),
    "multiple": ("n % {k} == 0", "the multiples of {k}", "all numbers divisible by {k}"),
}
_FOLDS = {
    "sum": (
        ("returns the sum of {w}", "adds up {v}", "returns the total of {w}", "sums {v}"),
        "Start with total = 0 and add every number with",
        "    total = 0\n    for n in {a}:\n"
        "        if {c}:\n            total += n\n    return total",
    ),
    "count": (
        (
            "counts {w}",
            "returns how many of {v} there are",
            "returns the number of {v}",
            "returns the count of {w}",
        ),
        "Start with count = 0 and add 1 for every number with",
        "    count = 0\n    for n in {a}:\n"
        "        if {c}:\n            count += 1\n    return count",
    ),
    "keep": (
        (
            "returns a list of {w}",
            "keeps only {w}",
            "returns a new list with {v}",
            "collects {v} in a list",
        ),
        "Start with an empty result and append every number with",
        "    result = []\n"
        "    for n in {a}:\n        if {c}:\n            result.append(n)\n    return result",
    ),
    "product": (
        (
            "returns the product of {w}",
            "multiplies {v}",
            "returns {v} multiplied together",
            "multiplies {w} together",
        ),
        "Start with product = 1 and multiply by every number with",
        "    product = 1\n"
        "    for n in {a}:\n        if {c}:\n            product *= n\n    return product",
    ),
}


def _folded() -> tuple[Spec, ...]:
    """Return every combination of a fold and a filter."""
    specs: list[Spec] = []
    for fold, (ways, plan, body) in _FOLDS.items():
        for name, (condition, which, every) in _FILTERS.items():
            does = "|".join(ways).replace("{w}", which).replace("{v}", every)
            code = body.replace("{c}", condition)
            specs.append(Spec(f"{fold}_{name}", "list", does, f"{plan} {condition}", code))
    return tuple(specs)


SPECS = (
    *_folded(),
    Spec(
        "largest",
        "list",
        "returns the largest number|finds the maximum|finds the largest number",
        "Use max",
        "    return max({a})",
    ),
    Spec(
        "smallest",
        "list",
        "returns the smallest number|finds the minimum|finds the smallest number",
        "Use min",
        "    return min({a})",
    ),
    Spec(
        "average",
        "list",
        "returns the average of the numbers|computes the mean|computes the average",
        "Divide the sum by the length",
        "    return sum({a}) / len({a})",
    ),
    Spec(
        "backwards",
        "list",
        "returns the list in reverse order|reverses the list|returns the list backwards",
        "Slice with step -1",
        "    return {a}[::-1]",
    ),
    Spec(
        "sort_up",
        "list",
        "returns the list in ascending order|sorts the numbers from smallest to "
        "largest|sorts the list in ascending order",
        "Use sorted",
        "    return sorted({a})",
    ),
    Spec(
        "sort_down",
        "list",
        "returns the list in descending order|sorts the numbers from largest to "
        "smallest|sorts the list in descending order",
        "Use sorted with reverse",
        "    return sorted({a}, reverse=True)",
    ),
    Spec(
        "add_each",
        "list",
        "adds {k} to every number|returns a list with {k} added to each number|returns every "
        "number plus {k}",
        "Go over the list and add {k} each time",
        "    return [n + {k} for n in {a}]",
    ),
    Spec(
        "times_each",
        "list",
        "multiplies every number by {k}|returns a list with each number times {k}|returns "
        "every number times {k}",
        "Go over the list and multiply by {k} each time",
        "    return [n * {k} for n in {a}]",
    ),
    Spec(
        "squares",
        "list",
        "squares every number|returns a list of the squares|returns the square of every number",
        "Go over the list and square each number",
        "    return [n * n for n in {a}]",
    ),
    Spec(
        "span",
        "list",
        "returns the difference between the largest and the smallest number|returns the maximum "
        "minus the minimum|subtracts the smallest number from the largest|returns the largest "
        "number minus the smallest number|returns the largest minus the smallest number",
        "Subtract min from max",
        "    return max({a}) - min({a})",
    ),
    Spec(
        "reverse_text",
        "text",
        "returns the text in reverse order|reverses the text|returns the text backwards",
        "Slice with step -1",
        "    return {a}[::-1]",
    ),
    Spec(
        "vowels",
        "text",
        "counts the vowels|returns the number of vowels|returns how many vowels there are",
        "Start with count = 0 and add 1 for every vowel",
        '    count = 0\n    for letter in {a}.lower():\n        if letter in "aeiou":\n'
        "            count += 1\n    return count",
    ),
    Spec(
        "no_vowels",
        "text",
        "removes all vowels|returns the text without vowels|removes every vowel",
        "Start with an empty result and add every letter that is no vowel",
        '    result = ""\n    for letter in {a}:\n'
        '        if letter.lower() not in "aeiou":\n            result += letter\n'
        "    return result",
    ),
    Spec(
        "no_spaces",
        "text",
        "removes all spaces|returns the text without spaces|removes every space",
        "Replace each space by nothing",
        '    return {a}.replace(" ", "")',
    ),
    Spec(
        "palindrome",
        "text",
        "checks if the text is a palindrome|returns True if the text reads the same "
        "backwards|tells if the text is a palindrome",
        "Compare the text with its reverse",
        "    return {a} == {a}[::-1]",
    ),
    Spec(
        "words",
        "text",
        "counts the words|returns the number of words|returns how many words there are",
        "Split the text and take the length",
        "    return len({a}.split())",
    ),
    Spec(
        "longest",
        "text",
        "returns the longest word|finds the longest word|finds the word with the most letters",
        "Use max over the words with len as key",
        "    return max({a}.split(), key=len)",
    ),
    Spec(
        "initials",
        "text",
        "returns the first letters of the words|joins the first letter of each word|returns "
        "the first letter of each word",
        "Split the text and join the first letters",
        '    return "".join(word[0] for word in {a}.split())',
    ),
    Spec(
        "upper",
        "text",
        "returns the text in upper case|turns all letters into capitals|returns the text in "
        "capitals",
        "Use upper",
        "    return {a}.upper()",
    ),
    Spec(
        "lower",
        "text",
        "returns the text in lower case|turns all letters into small letters|returns the "
        "text in small letters",
        "Use lower",
        "    return {a}.lower()",
    ),
    Spec(
        "repeat",
        "text",
        "repeats the text {k} times|returns the text {k} times in a row|returns the text "
        "repeated {k} times",
        "Multiply the text by {k}",
        "    return {a} * {k}",
    ),
    Spec(
        "first_part",
        "text",
        "returns the first {k} letters|keeps only the first {k} letters|cuts the text off after "
        "{k} letters|returns the text cut after {k} letters|cuts the text after {k} letters",
        "Slice up to {k}",
        "    return {a}[:{k}]",
    ),
    Spec(
        "factorial",
        "number",
        "returns the factorial|computes the factorial|multiplies all numbers from 1 up to "
        "the input",
        "Start with result = 1 and multiply by every number up to the input",
        "    result = 1\n    for i in range(1, {a} + 1):\n        result *= i\n    return result",
    ),
    Spec(
        "sum_to",
        "number",
        "returns the sum of all numbers from 1 up to the input|adds up all numbers from 1 to "
        "the input|sums all numbers from 1 up to the input",
        "Start with total = 0 and add every number up to the input",
        "    total = 0\n    for i in range(1, {a} + 1):\n        total += i\n    return total",
    ),
    Spec(
        "is_even",
        "number",
        "checks if the input is even|returns True if the input is even|tells if the input is even",
        "Look at the rest after dividing by 2",
        "    return {a} % 2 == 0",
    ),
    Spec(
        "is_multiple",
        "number",
        "checks if the input is a multiple of {k}|returns True if the input is divisible by "
        "{k}|tells if the input is divisible by {k}",
        "Look at the rest after dividing by {k}",
        "    return {a} % {k} == 0",
    ),
    Spec(
        "plus",
        "number",
        "adds {k} to the input|returns the input plus {k}|returns the sum of the input and {k}",
        "Add {k}",
        "    return {a} + {k}",
    ),
    Spec(
        "times",
        "number",
        "multiplies the input by {k}|returns the input times {k}|returns the product of the "
        "input and {k}",
        "Multiply by {k}",
        "    return {a} * {k}",
    ),
    Spec(
        "square_plus",
        "number",
        "returns the square of the input plus {k}|squares the input and adds {k}|adds {k} to "
        "the square of the input",
        "Square first, then add {k}",
        "    return {a} * {a} + {k}",
    ),
    Spec(
        "divisors",
        "number",
        "returns a list of the divisors|finds all divisors|collects the divisors in a list",
        "Try every number up to the input",
        "    result = []\n    for i in range(1, {a} + 1):\n        if {a} % i == 0:\n"
        "            result.append(i)\n    return result",
    ),
    Spec(
        "larger",
        "pair",
        "returns the larger of the two numbers|finds the larger number|finds the maximum of "
        "the two numbers",
        "Compare the two",
        "    if {a} > {b}:\n        return {a}\n    return {b}",
    ),
    Spec(
        "distance",
        "pair",
        "returns the absolute difference of the two numbers|computes the absolute "
        "difference|finds the absolute difference of the two numbers",
        "Subtract and use abs",
        "    return abs({a} - {b})",
    ),
    Spec(
        "weighted",
        "pair",
        "returns the first number plus {k} times the second|adds {k} times the second number "
        "to the first|returns the sum of the first number and {k} times the second",
        "Multiply the second by {k}, then add",
        "    return {a} + {k} * {b}",
    ),
)
