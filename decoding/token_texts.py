"""The text of every token of a vocabulary, so that most tokens need no decoding while they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

_found: WeakKeyDictionary[Any, TokenTexts] = WeakKeyDictionary()


class TokenTexts:
    """What each token of a tokenizer adds to a text, where that does not depend on the tokens around it.

    Attributes:
        texts: by token id; "" for special tokens, None where only decoding tells (a part of a character, for example).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._characters: dict[str, frozenset[int]] = {}
        backend = tokenizer.backend_tokenizer
        # Behind another token: some tokenizers drop the blank with which a text starts.
        anchor = backend.encode("a", add_special_tokens=False).ids[:1]
        before = backend.decode(anchor)
        pairs = [[*anchor, token] for token in range(max(tokenizer.get_vocab().values()) + 1)]
        self.texts = [
            text[len(before) :] if text.startswith(before) and "\ufffd" not in text else None
            for text in backend.decode_batch(pairs, skip_special_tokens=True)
        ]
        self._size = len(tokenizer)

    @classmethod
    def of(cls, tokenizer: Any) -> TokenTexts:
        """The texts of a tokenizer, made once as long as it does not grow."""
        found = _found.get(tokenizer)
        if found is None or found._size != len(tokenizer):
            found = _found[tokenizer] = cls(tokenizer)
        return found

    def holding(self, characters: str) -> frozenset[int]:
        """Tokens whose text holds one of the characters, or is not known."""
        if characters not in self._characters:
            wanted = set(characters)
            self._characters[characters] = frozenset(
                token for token, text in enumerate(self.texts) if text is None or not wanted.isdisjoint(text)
            )
        return self._characters[characters]

    def read(self, ids: Sequence[int]) -> str:
        """The text of tokens that stand within a response, without special tokens."""
        known = len(self.texts)  # a policy may have more outputs than its tokenizer has tokens
        texts = [self.texts[token] if token < known else "" for token in ids]
        return decode(self._tokenizer, ids) if None in texts else "".join(texts)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of a response, without special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
