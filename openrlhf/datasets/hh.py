"""Dialogues as HH-RLHF writes them: one text with Human and Assistant turns (Bai et al. 2022, arXiv 2204.05862)."""

from __future__ import annotations

import re

HH_TURN = re.compile(r"\n\n(Human|Assistant):")


def parse_hh(chosen: str, rejected: str) -> tuple[str, str, str] | str:
    """Split two HH dialogues at their final assistant turn.

    A turn starts at a blank line followed by `Human:` or `Assistant:`; the same words anywhere else are text.

    Returns:
        (prompt, chosen response, rejected response): the prompt runs up to and including the final
        "\\n\\nAssistant:", the responses keep the space that follows it. Or the reason why the pair is unusable:
        turns not in the order Human, Assistant, Human, ..., an empty turn, a last turn that is not the assistant's, an
        empty answer, or dialogues that differ before the final turn.
    """
    split = []
    for text in (chosen, rejected):
        marks = list(HH_TURN.finditer(text))
        if not marks or text[: marks[0].start()].strip():
            return "not_a_dialogue"
        if marks[-1].group(1) != "Assistant":
            return "last_turn_not_assistant"
        if any(mark.group(1) != ("Human", "Assistant")[i % 2] for i, mark in enumerate(marks)):
            return "misordered_turns"
        if any(not text[mark.end() : after.start()].strip() for mark, after in zip(marks, marks[1:], strict=False)):
            return "empty_turn"
        split.append((text[: marks[-1].end()], text[marks[-1].end() :]))
    (prompt, chosen_answer), (other_prompt, rejected_answer) = split
    if prompt.strip() != other_prompt.strip():
        return "prompts_differ"
    if not chosen_answer.strip() or not rejected_answer.strip():
        return "empty_response"
    return prompt, chosen_answer, rejected_answer


def hh_messages(prompt: str) -> list[dict[str, str]]:
    """The turns of an HH prompt (as parse_hh returns it) as chat messages, without the open assistant turn."""
    marks = list(HH_TURN.finditer(prompt))
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[mark.group(1)], "content": prompt[mark.end() : after.start()].strip()}
        for mark, after in zip(marks, marks[1:], strict=False)
    ]
