"""Answer extraction and equivalence, and the worker that keeps them bounded in time."""

from __future__ import annotations

import multiprocessing
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


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\boxed{\frac{3}{7}}", r"\frac{3}{7}"),
        (r"\boxed{8}, hmm, \boxed{11}", "11"),
        (r"\fbox{17}", "17"),
        (r"\boxed 9", "9"),
        (r"so $\boxed 9$.", "9"),
        (r"\boxed{\frac{3}{", None),
        (r"\boxed{}", None),
        (r"\boxed{6} so \boxed{", "6"),
        (r"\boxed{6} so \boxed{}", "6"),
        (r"\boxed{\left\{x : x>0\right.}", r"\left\{x : x>0\right."),
        (r"\boxedtext{3}", None),
        (None, None),
    ],
)
def test_last_complete_box_is_extracted(text, wanted):
    assert extract_boxed_answer(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("There are 36 pens, in all.", "36"),
        ("It fell to -5 degrees.", "-5"),
        ("It fell to \u22125 degrees.", "-5"),
        ("It costs $1,234.50.", "1234.50"),
        ("A loss of -$5", "-5"),
        ("pick 7 9", "9"),
        ("#### 2,000", "2000"),
        ("10-5", "5"),
        ("45,67", "67"),
        ("a share of .5", ".5"),
        ("a share of 3/4", "3/4"),
        ("no idea", None),
        ("3 and then \\boxed{4}, 5", "4"),
        (None, None),
    ],
)
def test_last_number_is_extracted_where_no_box_is(text, wanted):
    assert extract_answer(text) == wanted


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
    ("2,7", "(2,7)"),
    ("2,7", "7, 2"),
    (r"\{2,7\}", "2 and 7"),
    ("x=2 or x=3", "2,3"),
    ("17; 12", "12;17"),
    ("1,234, 5", "5, 1234"),
    (r"10,\!080", "10080"),
    (r"1\frac{1}{2}", "1.5"),
    ("1.5e3", "1500"),
    # 1/3 - 0.333333 = 1/3 * 1e-6: just inside the tolerance
    ("0.333333", "1/3"),
    (r"\text{(A)}", "A"),
    ("\\boxed{7}", "#### 7"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"),
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
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_equal_answers_in_both_directions(first, second):
    assert grade_answer(first, second)
    assert grade_answer(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different_answers_in_both_directions(first, second):
    assert not grade_answer(first, second)
    assert not grade_answer(second, first)


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


def _grade_in_fork(queue):
    queue.put(grade_answer("w+2", "2+w"))


def test_forked_process_gets_its_own_worker():
    assert grade_answer("w+1", "1+w")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_grade_in_fork, args=(queue,))
    child.start()
    assert queue.get(timeout=60)
    child.join()
    assert grade_answer("w+3", "3+w")  # ours was not closed by the child's exit


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


def test_labels_of_real_solutions_are_reproduced(shared_data):
    import json

    with open(shared_data / "gsm8k_solutions" / "validation.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    agreed = [
        grade_answer(extract_answer(row["generated_solution"]), row["expected_answer"]) == row["is_correct"]
        for row in rows
    ]
    assert len(agreed) == 500
    assert all(agreed)
