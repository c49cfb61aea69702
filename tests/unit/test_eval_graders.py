"""Graders: numbers, LaTeX, a user's own answers, programs with tests."""

from __future__ import annotations

import pytest

from strobe.tools.eval import graders, latex, programs

# LaTeX


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\frac12", r"\dfrac{1}{2}"),
        ("0.5", r"\frac{1}{2}"),
        (r"11\sqrt2", r"11\sqrt{2}"),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
        (r"\sqrt[3]{8}", "2"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        (r"90^\circ", "90"),
        (r"15\mbox{ cm}^2", "15"),
        (r"3\pi\text{ inches}", r"3\pi"),
        (r"\text{Evelyn}", "evelyn"),
        (r"10,\!000", "10000"),
        (r"\$32,348", "32348"),
        (r"x \in [-2,7]", "[-2,7]"),
        (r"1 \pm \sqrt{19}", r"1-\sqrt{19},1+\sqrt{19}"),
        ("1,-2", "-2, 1"),
        ("x^3+3x-6", "3x+x^3-6"),
        ("4210_{5}", "4210_5"),
        (r"1\frac{1}{2}", r"\frac{3}{2}"),
        (r"-\frac{35}{9}", "-35/9"),
        (r"\text{(B)}", "(B)"),
        ("2^{10}", "1024"),
        (r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{pmatrix}-1/3\\2\end{pmatrix}"),
        (r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}", r"\begin{bmatrix} \frac12 \\ 2 \end{bmatrix}"),
        (r"(3,\infty)\cup(-\infty,2)", r"(-\infty, 2) \cup (3, \infty)"),
        (r"\log_2 8", "3"),
        (r"\binom{5}{2}", "10"),
        (r"3 \ge x", r"x\le 3"),
        (r"2 \text{ or } 3", "2,3"),
        (r"\sin^2 x+\cos^2 x", "1"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        (r"3+4i", "4i+3"),
        ("2.50", "2.5"),
        (r"12\_a", r"12\_a"),
    ],
)
def test_equal_answers_match(answer: str, expected: str):
    assert latex.same(answer, expected)
    assert latex.same(expected, answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1", "2"),
        ("(1,2)", "(2,1)"),
        ("[0,1)", "[0,1]"),
        ("0.333", r"\frac13"),
        ("", ""),
        ("2x", "x"),
        ("Evelyn", "Evan"),
        (r"\sqrt{-1}", "1"),
        ("4210_5", "4210"),
        ("9^9^9^9", "1"),
        ("10^{999}", "5"),
        ("(" * 500, "1"),
        ("1,2", "1"),
        ("10_2", "10_3"),
        ("100000000000000001", "100000000000000000"),
        ("x>3", "x<3"),
        (r"x<3", r"x\le3"),
        ("x", "y"),
        ("__import__('os')", "1"),
    ],
)
def test_different_answers_do_not_match(answer: str, expected: str):
    assert not latex.same(answer, expected)


def test_comparer_restarts_after_a_timeout():
    comparer = latex.Comparer(seconds=0.2)
    try:
        assert not comparer.same("9999999999!", "1")
        comparer.seconds = 60
        assert comparer.same(r"\frac12", "0.5")
    finally:
        comparer.close()


def test_latex_needs_math_verify(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(latex, "find_spec", lambda name: None)
    assert latex.same("x + 1", "x+1")
    assert not latex.same("17", "18")
    with pytest.raises(ValueError, match=r"^Answers are .* pip install 'strobe\[eval\]'\.$"):
        latex.same(r"\frac12", "0.5")


# texts


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        (r"5 + 13 = \boxed{18}", "5+13 #### 18", True),
        (r"\boxed{\$18}", "#### 18", True),
        (r"\boxed{\frac{36}{2}}", "#### 18", True),
        (r"\boxed{7}, not 18", "#### 18", False),
        ("So he pays $1,234.50.", "#### 1234.5", True),
        ("The answer is 42. She has 3 cats.", "#### 42", True),
        ("**Answer: 18**", "#### 18", True),
        ("From 10-20 we take 20", "#### 20", True),
        ("<think>18</think> It is 7.", "#### 18", False),
        ("-5", "#### 5", False),
        ("", "#### 4", False),
    ],
)
def test_gsm8k_grades_the_final_number(text: str, expected: str, right: bool):
    assert graders.number(text, expected=expected) is right


def test_few_shot_gsm8k_grades_the_first_marked_number():
    assert graders.few_shot_number(" 3 + 9\n#### 12\n\nNow 5", expected="#### 12")
    assert graders.few_shot_number("so it is 12.", expected="#### 12")
    assert not graders.few_shot_number("no idea", expected="#### 12")


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        (r"so $x=\boxed{\frac{1}{2}}$", r"\frac12", True),
        (r"\boxed{1} or rather \boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{\text{no}", "no", False),
        ("so $5$ and then $7$.", "7", True),
        ("The answer is $3$.", "3", True),
        ("it is 5, then 6", "6", True),
    ],
)
def test_math_grades_the_last_box(text: str, expected: str, right: bool):
    assert graders.mathematics(text, expected=expected) is right


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("I sort.\nAnswer: fig, pear", "fig, pear", True),
        ("PARIS.", "paris", True),
        ("It is 5", "5", True),
        ("It is Berlin", "Paris", False),
    ],
)
def test_custom_data_grades_the_stated_answer(text: str, expected: str, right: bool):
    assert graders.answer(text, expected=expected) is right


# programs


@pytest.mark.parametrize(
    ("program", "passed"),
    [
        ("import math\nassert math.pi > 3\nprint('fine')", True),
        ("assert False", False),
        ("def f(:", False),
        ("import sys; sys.exit(0)", False),
        ("import os; os._exit(0)", False),
        ("memory = bytearray(3 << 30)", False),
        ("input()", False),
    ],
)
def test_program_passes_if_it_reaches_its_end(program: str, passed: bool):
    assert programs.passes(program, 20.0) is passed


def test_endless_program_is_killed():
    assert not programs.passes("while True: pass", 0.3)


def test_code_is_the_block_that_defines_the_function():
    text = "Try:\n```python\ndef f(x):\n    return x\n```\nuse it:\n```python\nprint(f(1))\n```"
    assert programs.code_of(text, ["f"]) == "def f(x):\n    return x\n"
    assert programs.code_of("```\ndef g(): pass", ["g"]) == "def g(): pass"
    assert programs.code_of("no code", ["f"]) == "no code"


def test_human_eval_program_joins_imports_code_and_tests():
    prompt = "from math import pi\n\ndef helper():\n    return 1\n\ndef f(x):\n    '''Doc.'''\n"
    tests = "def check(candidate):\n    assert candidate(2) == 7\n"
    right = "```python\ndef f(x):\n    return 2 * x + 2 + helper() + int(pi < 3)\n```"
    assert programs.passes(programs.human_eval(right, prompt=prompt, tests=tests, name="f"), 20.0)
    wrong = right.replace("2 * x", "x")
    program = programs.human_eval(wrong, prompt=prompt, tests=tests, name="f")
    assert not programs.passes(program, 20.0)
    body = "    return 7"  # a base model continues the prompt's function
    assert programs.passes(programs.human_eval(body, prompt=prompt, tests=tests, name="f"), 20.0)


def test_mbpp_program_finds_the_tested_function():
    text = "```python\ndef other(): pass\n```\n```python\ndef add(a, b):\n    return a + b\n```\n"
    text += "```python\nprint(add)\n```"
    tests = ("assert set(add([1], [2])) == {1, 2}", "assert add(1, 2) == 3")
    program = programs.mbpp(text, imports=("import math",), tests=tests)
    assert "def add" in program
    assert programs.passes(program, 20.0)
