"""Extraction of final answers: boxes, answer fields of JSON texts, numbers."""

from __future__ import annotations

import pytest

from openrlhf.rewards.extraction import extract_answer, extract_boxed_answer


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
        (r"a share of $\frac{3}{7}$.", r"\frac{3}{7}"),
        (r"it falls by $-2\frac{1}{2}$", r"-2\frac{1}{2}"),
        ("it takes 2 1/2 hours", "2 1/2"),
        ("on page 7 9/10 of it", "7 9/10"),
        ("It grows by 35%.", "35%"),
        (r"It grows by $35\%$.", "35%"),
        ("It grows by 35 percent.", "35%"),
        ("35% of the pens are 7 pens", "7"),
        ("about 3 million people", "3 million"),
        (r"A loss of -\$1,234", "-1234"),
        ("A loss of -\u20ac5", "-5"),
        ("It costs \u00a51,200", "1200"),
        (r"It costs $1{,}234{,}567$.", "1234567"),
        ("an area of 7 cm^2", "7"),
        (r"an area of $7 \text{ cm}^{2}$", "7"),
        ("a speed of 5 m s^{-1}", "5"),
        ("e^12", None),
        ("no idea", None),
        ("3 and then \\boxed{4}, 5", "4"),
        (None, None),
    ],
)
def test_last_number_is_extracted_where_no_box_is(text, wanted):
    assert extract_answer(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\boxed{\frac{3}{", None),
        (r"\boxed{5", None),
        (r"so it is 12. Therefore \boxed{\frac{3}{", "12"),
        (r"so it is 12. Therefore $\boxed{1", "12"),  # a 1 that may be the first digit of 12
        (r"\boxed{6} so 7, \boxed{", "6"),
        (r"it is 12, \boxed{}", "12"),
        (r"it is 12, \boxed{} or 13", "13"),
        ('{"reasoning": "3 and 4 is 7", "answer": "1', "7"),
        ('{"reasoning": "3 and 4 is 7", "answer": 1', "7"),
    ],
)
def test_answer_that_the_end_of_the_text_cuts_off_is_not_read(text, wanted):
    assert extract_answer(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"reasoning": "3 and 4", "answer": "7"}', "7"),
        ('```json\n{\n  "reasoning": "3 and 4 is 7.",\n  "answer": "1,200"\n}\n``` \n\n**Check:** 3 + 4 = 7', "1,200"),
        ('{"reasoning": "a "quoted" word, 3", "answer": 18\n}', "18"),  # not valid JSON, like the next ones
        ('{"reasoning": "7\n\n8", "answer": "18"', "18"),
        ('{"answer": "answer": "1249"}', "1249"),
        ('{"answer": (150 * 2) + 240\n}', "(150 * 2) + 240"),
        ('{"answer": 18, "reasoning": "because 5 + 13"}', "18"),
        ('{"answer": [2, 7]}', "[2, 7]"),
        ('{"answer": "Not possible", "why": "5"}', "Not possible"),
        (r'{"answer": "\\frac{3}{7}"}', r"\frac{3}{7}"),
        (r'{"answer": "\frac{3}{7}"}', r"\frac{3}{7}"),  # \f is a form feed to JSON alone
        (r'{"answer": "6 \u00f7 3"}', "6 \u00f7 3"),
        (r'{"reasoning": "\\boxed{4}", "answer": "$\\boxed{5}$"}', "5"),
        (r'{"answer": "18"} so \boxed{19}', "19"),
        ('{"reasoning": "it is 7", "answer": null}', "7"),
        ('{"reasoning": "it is 7", "answer": ""}', "7"),
        ('he says "answer": 5 and means 6', "6"),  # no object
    ],
)
def test_answer_field_of_a_json_text_is_extracted(text, wanted):
    assert extract_answer(text) == wanted
