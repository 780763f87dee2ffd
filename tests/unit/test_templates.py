"""Prompt templates and chat prompts."""

from __future__ import annotations

import pytest

from openrlhf.datasets.templates import TEMPLATES, message_text, render_chat_prompt, render_prompt, split_chat
from tests.tiny import tiny_tokenizer


def test_nemo_template_is_the_openmathinstruct_prompt():
    assert render_prompt("nemo", "1+1?") == (
        "System:\nYou're an expert Python programmer and mathematician. Help the user to solve this problem using code "
        "when necessary. Make sure to put the answer (and only answer) inside \\boxed{}.\n\nUser:\n1+1?\n\nAssistant:\n"
    )


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_braces_in_a_question_are_text(name):
    question = r"What is {question} and \frac{1}{2} and {} and {0}?"
    rendered = render_prompt(name, question)
    assert rendered.count(question) == 1
    assert rendered == TEMPLATES[name].replace("{question}", question)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("Q: {}\nA:", "Q: 7{}\nA:"),
        ("Q: {question} \\boxed{}", "Q: 7{} \\boxed{}"),
        ("{x} {question}{question}", "{x} 7{}7{}"),
        ("{}", "7{}"),
    ],
)
def test_custom_templates(template, expected):
    assert render_prompt(template, "7{}") == expected


@pytest.mark.parametrize("template", ["nemoo", "", "{ question }", "{} and {}", r"\boxed{{}} {}"])
def test_templates_without_one_clear_place_are_refused(template):
    with pytest.raises(ValueError, match="question"):
        render_prompt(template, "x")


def test_chat_prompt_ends_where_the_answer_starts():
    messages = [{"role": "user", "content": "hi"}]
    assert render_chat_prompt(messages, tiny_tokenizer()) == "<|user|>\nhi</s>\n<|assistant|>\n"


def test_split_chat_returns_the_last_message_as_it_is():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": " d </s> e "},
    ]
    prompt, response = split_chat(messages, tiny_tokenizer())
    assert prompt == "<|user|>\na</s>\n<|assistant|>\nb</s>\n<|user|>\nc</s>\n<|assistant|>\n"
    assert response == " d </s> e "


def test_split_chat_refuses_a_conversation_that_ends_with_the_user():
    with pytest.raises(ValueError, match="ends with role 'assistant'.*'user'"):
        split_chat([{"role": "user", "content": "a"}], tiny_tokenizer())


def test_missing_chat_template_names_the_flags():
    with pytest.raises(ValueError, match="--tokenizer_chat_template.*--input_template"):
        render_chat_prompt([{"role": "user", "content": "a"}], tiny_tokenizer(chat_template=False))


def test_template_that_refuses_the_roles_is_a_value_error():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        render_chat_prompt([{"role": "user", "content": "a"}], tokenizer)


def test_message_content_in_text_parts():
    assert (
        message_text({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
        == "ab"
    )
    with pytest.raises(ValueError, match="'user'"):
        message_text({"role": "user", "content": [{"type": "image", "image": "x.png"}]})
