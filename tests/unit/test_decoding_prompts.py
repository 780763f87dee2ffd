"""Questions of every kind of data: columns, answers, prompts of both models, and rows that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from decoding.config import DecodingConfig
from decoding.prompts import Rendering, check_lengths, choose_rendering, grade_for, read_questions, render_questions
from decoding.records import Question
from openrlhf.cli.reward_checkpoint import RewardCheckpoint
from tests.tiny import tiny_tokenizer

STEPS = "\nWork it out step by step, one step a line, and put the final answer in \\boxed{}."


def config(dt_name, input_file=None, **settings):
    name = None if input_file is None else str(input_file)
    return DecodingConfig(dt_name=dt_name, input_file=name, model_name="lm", **settings)


def write(path, rows):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def checkpoint(template="plain", chat=False):
    return RewardCheckpoint("rm", Path("rm"), "0", template, chat, 128)


def rendered(asked, dt_name, chat_template=True, reward=None, **settings):
    tokenizer = tiny_tokenizer(chat_template=chat_template)
    rendering = choose_rendering(config(dt_name, "file", **settings), tokenizer)
    return render_questions(asked, rendering, tokenizer, reward and (reward, tiny_tokenizer()))


def test_gsm8k_rows(tmp_path):
    rows = [
        {"question": "what is 3 + 4 ?", "answer": "3 + 4 = <<3+4=7>>7\n#### 1,007", "id": 5},
        {"question": "how many ?", "expected_answer": 12, "answer": "ignored"},
        {"question": "and this ?"},
    ]
    asked = read_questions(config("gsm8k", write(tmp_path / "q.jsonl.gz", rows)))
    assert [one.expected_answer for one in asked] == ["1,007", "12", None]
    assert [one.index for one in asked] == [0, 1, 2]
    assert dict(asked[0].row) == {"id": 5}  # neither the solution nor anything that a completion has of its own
    (first, *_) = rendered(asked, "gsm8k", reward=checkpoint("nemo"))
    assert first.policy_prompt == f"<|user|>\nwhat is 3 + 4 ?{STEPS}</s>\n<|assistant|>\n"
    assert first.reward_prompt.endswith("User:\nwhat is 3 + 4 ?\n\nAssistant:\n")  # as the reward model was trained
    (first, *_) = rendered(asked, "gsm8k", chat_template=False)
    assert first.policy_prompt == f"what is 3 + 4 ?{STEPS}\n" and first.reward_prompt is None
    (first, *_) = rendered(asked, "gsm8k", input_template="Q: {question}\nA:")
    assert first.policy_prompt == "Q: what is 3 + 4 ?\nA:"  # also where there is a chat template


def test_start_and_end_keep_the_numbers_of_the_rows(tmp_path):
    file = write(tmp_path / "q.jsonl", [{"question": f"what is {k} ?"} for k in range(6)])
    asked = read_questions(config("custom", file, start=2, end=4))
    assert [(one.index, one.text) for one in asked] == [(2, "what is 2 ?"), (3, "what is 3 ?")]
    assert len(read_questions(config("custom", file, start=5, end=99))) == 1
    with pytest.raises(ValueError, match="--start 6 --end None: .* has 6 questions, none of them there"):
        read_questions(config("custom", file, start=6))


def test_helpsteer_and_custom_rows(tmp_path):
    asked = read_questions(config("helpsteer", write(tmp_path / "h.jsonl", [{"prompt": "Write.\n", "answer": "3"}])))
    assert asked[0].expected_answer is None
    assert rendered(asked, "helpsteer")[0].policy_prompt == "<|user|>\nWrite.\n</s>\n<|assistant|>\n"
    told = "Instruction:\nWrite.\n\n\nResponse:\n"
    assert rendered(asked, "helpsteer", chat_template=False)[0].policy_prompt == told
    file = write(tmp_path / "c.jsonl", [{"task": "what is 3 ?", "answer": "three"}])
    asked = read_questions(config("custom", file, question_key="task"))
    assert (asked[0].text, asked[0].expected_answer) == ("what is 3 ?", "three")
    assert rendered(asked, "custom", chat_template=False)[0].policy_prompt == "what is 3 ?\n"


def test_pocket_keeps_its_own_template():
    asked = read_questions(config("pocket", "ood:3"))
    assert len(asked) == 3 and asked[0].row["equations"] in (5, 6) and asked[0].expected_answer.isdecimal()
    (first, *_) = rendered(asked, "pocket", reward=checkpoint("pocket"))
    assert first.policy_prompt == first.reward_prompt == asked[0].text + "\n"
    (first, *_) = rendered(asked, "pocket", apply_chat_template=True)
    assert first.policy_prompt == f"<|user|>\n{asked[0].text}</s>\n<|assistant|>\n"


def test_a_conversation_goes_on_behind_the_users_last_message(tmp_path):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"), ("assistant", "old")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (asked,) = read_questions(config("chat", write(tmp_path / "c.jsonl", [{"messages": messages}])))
    assert asked.text == "system: Be brief.\n\nuser: Hi\n\nassistant: Hello\n\nuser: Why?"
    (question,) = rendered([asked], "chat", reward=checkpoint("{}", chat=True))
    body = "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nWhy?</s>\n<|assistant|>\n"
    assert question.policy_prompt == question.reward_prompt == body
    assert [message["role"] for message in question.row["messages"]] == ["system", "user", "assistant", "user"]
    with pytest.raises(ValueError, match="row 0: a conversation of 4 messages, and rm was trained with the template"):
        rendered([asked], "chat", reward=checkpoint("plain"))
    single = write(tmp_path / "s.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    (question,) = rendered(read_questions(config("chat", single)), "chat", reward=checkpoint("plain"))
    assert (question.text, question.reward_prompt) == ("Hi", "Hi\n")


def test_a_chat_template_that_is_needed_and_missing():
    for settings in ({"dt_name": "chat"}, {"dt_name": "custom", "apply_chat_template": True}):
        with pytest.raises(ValueError, match="the tokenizer of lm has no chat template"):
            choose_rendering(config(settings.pop("dt_name"), "file", **settings), tiny_tokenizer(chat_template=False))
    assert choose_rendering(config("custom", "file"), tiny_tokenizer(chat_template=False)) == Rendering("plain", False)


@pytest.mark.parametrize(
    ("dt_name", "row", "told"),
    [
        ("gsm8k", {"prompt": "what", "id": 3}, r"row 1: expected text under 'question', got nothing; the row has "),
        ("gsm8k", {"question": " "}, "row 1: expected text under 'question', got .*--question_key"),
        ("chat", {"messages": []}, "row 1: expected a list of messages under 'messages'"),
        ("chat", {"messages": [{"role": "assistant", "content": "x"}]}, "row 1: expected a message of the user"),
    ],
)
def test_rows_without_a_question_are_named(tmp_path, dt_name, row, told):
    good = {"messages": [{"role": "user", "content": "x"}]} if dt_name == "chat" else {"question": "x"}
    with pytest.raises(ValueError, match=told):
        read_questions(config(dt_name, write(tmp_path / "q.jsonl", [good, row])))


def test_the_keys_of_a_row_without_a_question_are_told(tmp_path):
    file = write(tmp_path / "q.jsonl", [{"question": "x"}, {"prompt": "what", "id": 3}])
    with pytest.raises(ValueError, match=r"the row has \['prompt', 'id'\]"):
        read_questions(config("gsm8k", file))


def test_an_empty_file_and_a_missing_one(tmp_path):
    with pytest.raises(ValueError, match="no rows in"):
        read_questions(config("gsm8k", write(tmp_path / "q.jsonl", [])))
    with pytest.raises(ValueError, match="no such file"):
        read_questions(config("gsm8k", tmp_path / "absent.jsonl"))


def test_prompts_that_do_not_fit_are_named():
    tokenizer = tiny_tokenizer()
    prompts = [(4, "a b"), (7, "a b c d")]
    longest = len(tokenizer("a b c d")["input_ids"])
    assert check_lengths(prompts, tokenizer, longest + 3, 3, "policy") == longest
    assert check_lengths(prompts, tokenizer, None, 99, "policy") == longest
    with pytest.raises(ValueError, match=f"row 7: its prompt of {longest} tokens .* pass --max_tokens 1 or less"):
        check_lengths(prompts, tokenizer, longest + 2, 3, "policy")
    with pytest.raises(ValueError, match="row 7: .* leave it out"):
        check_lengths(prompts, tokenizer, longest, 1, "policy")
    with pytest.raises(ValueError, match="row 3: the prompt has no token"):
        check_lengths([(3, "")], tokenizer, None, 1, "policy")


def test_grades():
    def asked(answer):
        return Question(0, "q", "q", None, answer)

    pocket, gsm8k, chat = grade_for("pocket"), grade_for("gsm8k"), grade_for("chat")
    assert pocket(asked("7"), "so 7") == (None, False)  # only the box counts
    assert pocket(asked("7"), r"\boxed{7}") == ("7", True) and pocket(asked(None), r"\boxed{7}") == ("7", None)
    assert gsm8k(asked("1,007"), "it is 1007") == ("1007", True) and gsm8k(asked("7"), "it is 8") == ("8", False)
    assert gsm8k(asked(None), "it is 8") == ("8", None)
    assert chat(asked(None), "it is 8") == (None, None)
