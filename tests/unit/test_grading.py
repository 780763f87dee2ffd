"""Equality of answers, and the worker that keeps it bounded in time and memory."""

from __future__ import annotations

import multiprocessing
import random
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openrlhf.rewards import grading_worker
from openrlhf.rewards.grading import extract_answer, extract_boxed_answer, grade_answer, normalise_answer

ROOT = Path(__file__).resolve().parents[2]


EQUAL = [
    ("3,000", "3000"),
    (r"\frac{1}{4}", "0.25"),
    (r"\dfrac14", r"\frac{1}{4}"),
    ("35%", r"35\%"),
    (r"90^\circ", "90"),
    ("-10\u00b0F", "-10"),
    (r"20^{\circ}\text{C}", "20"),
    ("x=5", "5"),
    ("2", "2.0"),
    (r"\text{Tuesday}", "Tuesday"),
    (r"\left( 4, \frac{\pi}{3} \right)", r"(4,\frac{\pi}{3})"),
    (r"\frac{\pi}{6}+0.5", r"\pi/6+1/2"),
    # policies: percent, units, lists
    (r"35\%", "0.35"),
    ("50 percent", "0.5"),
    ("3 cm", "3"),
    (r"3\text{ cm}^2", "3"),
    ("60 miles per hour", "60"),
    ("$12", "12"),
    ("3 million", "3000000"),
    ("\u00a512", "12"),
    ("2,7", "(2,7)"),
    ("2,7", "7, 2"),
    (r"\{2,7\}", "2 and 7"),
    ("x=2 or x=3", "2,3"),
    ("17; 12", "12;17"),
    ("1,234, 5", "5, 1234"),
    (r"10,\!080", "10080"),
    (r"1\frac{1}{2}", "1.5"),
    # `\\ ` ends a row of a matrix; the blank in it is not the command `\ `
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{pmatrix}0.5\\2\end{pmatrix}"),
    ("1.5e3", "1500"),
    # 1/3 - 0.333333 = 1/3 * 1e-6: just inside the tolerance
    ("0.333333", "1/3"),
    (r"\text{(A)}", "A"),
    ("\\boxed{7}", "#### 7"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
    # units that touch the number, and units behind an expression
    ("48g", "48"),
    ("156kgs", "156"),
    ("12 p.m.", "12"),
    (r"10\pi\text{ cm}^2", r"10\pi"),
    (r"3\text{ J}", "3"),
    # what the value is of, before the last equals sign
    ("20 + 6 + 8 = 34", "34"),
    ("1.5 miles * 2 + 6 miles * 2 = 3 miles + 12 miles = 15 miles", "15"),
    (r"\angle ABC=90^\circ", "90"),
    ("a_{10} = 5", "5"),
    ("(x, y) = (1, 2)", "(1,2)"),
    ("f(x)=2x", "2x"),
    (r"x \approx 5", "5"),
    ("y=2x+3", "y-2x=3"),
    ("x+y-z+1=0", "-x-y+z-1=0"),
    (r"x\in[1,2]", r"1\leq x\leq 2"),
    ("x<=3", r"(-\infty,3]"),
    ("11_3", "11_{3}"),
    ("1010_2", "1010"),
    # an expression in m, which math-verify alone takes for metres
    ("2m+1", "1+2m"),
    (r"5\cdot m", "m*5"),
    # calculations that were not carried out
    ("(5 + 4 + 2) * 7", "77"),
]
DIFFERENT = [
    ("2,7", "27"),
    ("45,67", "4567"),
    ("(1,2)", "(2,1)"),
    ("[1,6)", "(1,6)"),
    ("5", "-5"),
    ("3", "3.001"),
    ("1", "10"),
    # policies
    (r"35\%", "35"),
    ("3x", "3"),
    ("3 pi", "3"),
    ("3 million", "3"),
    (r"\{2,7\}", "(2,7)"),
    ("(1,234)", "1234"),
    ("10000000", "10000001"),
    ("1000000.5", "1000001"),
    ("0.000001", "0.000002"),
    ("Tuesday", "Monday"),
    ("no solution", "0"),
    ("5/0", "5"),
    ("1e999", "7"),
    ("", ""),
    (None, "5"),
    # letters that are no units
    ("7t", "7"),
    ("3m", "3"),
    ("5t", "5s"),
    (r"\frac{1}{2}m", r"\frac{1}{2}"),
    ("x+2m", "x+2"),
    # an equation is no value
    ("x+y-z+1=0", "0"),
    ("2x=10", "10"),
    ("x^2+y^2=25", "25"),
    ("AB = 2, CD = 3", "3"),
    ("x>=5", "5"),
    (r"x\neq 5", "5"),
    ("11_3", "11_5"),
    # a number inside a text that is no expression
    ("1 + ", "1"),
    ("[3, 5", "5"),
    ("the answer is about 5", "5"),
    ("3 & 4", "4"),
    ("4:30 p.m.", "4:30 a.m."),
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_equal_answers_in_both_directions(first, second):
    assert grade_answer(first, second)
    assert grade_answer(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different_answers_in_both_directions(first, second):
    assert not grade_answer(first, second)
    assert not grade_answer(second, first)


@pytest.mark.parametrize(
    ("first", "second", "strict", "lenient"),
    [
        ("60%", "60", False, True),
        (r"60\%", "60", False, True),
        ("60 percent", "60", False, True),
        ("60%", "0.6", True, True),
        ("60%", "60%", True, True),
        ("60%", "6", False, False),
        ("60", "0.6", False, False),
        ("%", "60", False, False),
    ],
)
def test_lenient_percent_also_takes_the_bare_number(first, second, strict, lenient):
    assert grade_answer(first, second) is grade_answer(second, first) is strict
    assert grade_answer(first, second, percent="lenient") is lenient
    assert grade_answer(second, first, percent="lenient") is lenient


def test_numbers_are_accepted_as_answers():
    assert grade_answer(18, "18")
    assert grade_answer(18.0, 18)


def test_normalised_text_is_the_same_for_equal_numbers_and_words():
    assert {normalise_answer(text) for text in ("3,000", "3000.0", "$3000", "3000 apples")} == {"3000"}
    assert normalise_answer("35%") == normalise_answer("0.35") == "7/20"
    assert normalise_answer(r"\text{Tuesday}") == normalise_answer("tuesday.") == "tuesday"
    assert normalise_answer(None) == ""


def test_plain_answers_need_no_worker_and_little_time(monkeypatch):
    def refuse(*_):
        raise AssertionError("a number was sent to the worker")

    monkeypatch.setattr("openrlhf.rewards.grading.equal_expressions", refuse)
    start = time.perf_counter()
    assert all(grade_answer(str(number), f"{number}.0" if number % 2 else str(number)) for number in range(10_000))
    assert not any(grade_answer(str(number), str(number + 1)) for number in range(10_000))
    assert time.perf_counter() - start < 2.0  # 0.2 s measured; generous for a loaded machine


def test_grading_from_threads_agrees_with_the_main_thread():
    pairs = [(f"x+{number}", f"{number}+x") for number in range(12)] + [(f"x+{n}", f"x-{n}") for n in range(1, 13)]
    with ThreadPoolExecutor(6) as threads:
        verdicts = list(threads.map(lambda pair: grade_answer(*pair), pairs))
    assert verdicts == [True] * 12 + [False] * 12
    assert threading.current_thread() is threading.main_thread()


def test_endless_comparison_is_cut_and_the_next_one_works(caplog):
    assert grade_answer("y+1", "1+y")  # the worker is running: its start is not part of the limit
    start = time.monotonic()
    assert not grade_answer("9^{9^{9^{9}}}+y", "y", time_limit_s=0.5)
    assert time.monotonic() - start < 5
    assert "0.5 s" in caplog.text
    assert grade_answer("y+2", "2+y")


def test_worker_killed_from_outside_is_replaced():
    assert grade_answer("z+1", "1+z")
    for worker in grading_worker._pool().idle:
        worker.process.kill()
        worker.process.wait()
    assert grade_answer("z+2", "2+z")


def _grade_in_a_thread_of_a_child(queue):
    with ThreadPoolExecutor(1) as threads:
        queue.put(threads.submit(grade_answer, "w+2", "2+w").result())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process_gets_its_own_worker_even_in_a_thread(method):
    assert grade_answer("w+1", "1+w")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_grade_in_a_thread_of_a_child, args=(queue,), daemon=True)
    child.start()
    assert queue.get(timeout=120)
    child.join()
    assert grade_answer(f"w+3+{len(method)}", f"3+{len(method)}+w")  # ours was not closed by the child's exit


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="prlimit exists on Linux only")
def test_worker_has_a_memory_limit():
    assert grade_answer("u+1", "1+u")
    worker = grading_worker._pool().idle[-1]
    assert resource.prlimit(worker.process.pid, resource.RLIMIT_AS)[0] == grading_worker.MEMORY_LIMIT_BYTES


@pytest.mark.parametrize("expression", [r"\binom{10^9}{5\cdot 10^8}", "(10^9)!", "x^" * 400 + "2", "(" * 400 + "y"])
def test_expression_that_explodes_is_counted_as_different_in_time(expression):
    assert grade_answer("y+1", "1+y")
    start = time.monotonic()
    assert not grade_answer(expression, "x+1", time_limit_s=0.5)
    assert time.monotonic() - start < 5  # the limit, and at most one start of a worker that died


def test_looping_and_deeply_nested_texts_are_graded_in_little_time():
    start = time.perf_counter()
    assert extract_boxed_answer("\\boxed{" * 20_000) is None
    assert extract_boxed_answer("\\boxed{5} " + "\\boxed{" * 20_000) == "5"
    assert extract_answer("7 " * 20_000) == "7"
    assert not grade_answer("(" * 20_000 + "1,2" + ")" * 20_000, "5")
    assert not grade_answer("(" * 200 + "1,2" + "),3" * 200, "(" * 200 + "1,3" + "),3" * 200, time_limit_s=1.0)
    assert not grade_answer("1," * 400, "2," * 400, time_limit_s=1.0)
    assert not grade_answer("x" * 50_000, "y" * 50_000)
    assert grade_answer("x" * 50_000, "x" * 50_000)
    assert time.perf_counter() - start < 10  # two comparisons may run into their limit of 1 s


def test_missing_math_verify_is_named(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(grading_worker, "_shared_pool", None)
    with pytest.raises(RuntimeError, match="pip install math-verify"):
        grade_answer("v+1", "1+v")


def test_utils_reexports_are_lazy():
    code = (
        "import sys, openrlhf.utils; assert 'openrlhf.rewards' not in sys.modules;"
        "from openrlhf.utils import grade_answer, extract_boxed_answer; assert grade_answer('5', '5.0')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


PIECES = [
    *r"{ } \{ \} \ \\ ( ) [ ] 1 12 1, 1,234 , . - $ \$ % \% / = x ab \boxed{ \boxed \fbox{ \frac{".split(),
    *r"\frac{1}{2} }{".split(),
    *r'" "answer": "answer":" e9 E+99 1e999 ^ ^{2} _ _{3} \text{ \text{cm} ^\circ #### cm x= f(x)= \in \times'.split(),
    *"| < >= + * : ; ! ~ \\left( \\right) \\sqrt \\pm \u2212 \u00b0 \u03c0 \u00b2 \u00bd \u0663".split(),
    *(" ", "\n", " and ", " percent", " million", " cm", "\u2028", "\u00a0", "\ud800"),
]


def _random_text(rng: random.Random, pieces: int) -> str:
    return "".join(rng.choice(PIECES) for _ in range(pieces))


def test_random_texts_grade_the_same_in_both_directions_and_never_crash(monkeypatch):
    monkeypatch.setattr("openrlhf.rewards.grading.equal_expressions", lambda *_: False)  # our own part alone
    rng = random.Random(0)
    for _ in range(5000):
        first = _random_text(rng, rng.randint(0, 12))
        second = first if rng.random() < 0.2 else _random_text(rng, rng.randint(0, 12))
        verdict = grade_answer(first, second)
        assert verdict is grade_answer(second, first)
        found = extract_answer(first + second)
        assert found is None or found == found.strip() != ""
        if normalise_answer(first) == normalise_answer(second) != "":
            assert verdict, (first, second)


def test_random_expressions_get_the_same_verdict_in_both_directions():
    rng = random.Random(1)
    for _ in range(60):
        first, second = _random_text(rng, 4), _random_text(rng, 4)
        assert grade_answer(first, second, time_limit_s=1.0) is grade_answer(second, first, time_limit_s=1.0)


def test_repeated_patterns_cost_little_time(monkeypatch):
    """Texts of one pattern over and over are what makes a careless regular expression quadratic or worse."""
    monkeypatch.setattr("openrlhf.rewards.grading.equal_expressions", lambda *_: False)
    rng = random.Random(2)
    for _ in range(100):
        start, pattern, end = (_random_text(rng, rng.randint(low, 4)) for low in (0, 1, 0))
        long, short = ((start + pattern * size)[:size] + end for size in (50_000, 980))
        begin = time.perf_counter()
        extract_boxed_answer(long), extract_answer(long), normalise_answer(long), grade_answer(long, "5")
        normalise_answer(short), grade_answer(short, "5"), grade_answer(short, short[:-1] + "7")
        assert time.perf_counter() - begin < 3, (start, pattern, end)  # 0.2 s measured at worst


def test_solution_of_forty_thousand_characters_is_read_in_milliseconds():
    text = r"So $x = 1{,}234 - \frac{3}{7}$, hence {\{ } 5 of 6. " * 800 + r"It is \boxed{7}. \boxed{"
    begin = time.perf_counter()
    assert extract_answer(text) == "7"
    assert time.perf_counter() - begin < 0.5  # 0.02 s measured; generous for a loaded machine
