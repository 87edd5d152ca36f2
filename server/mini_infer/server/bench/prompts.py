"""Prompts that nobody has seen: random token ids. Knows no tokenizer."""

from __future__ import annotations

from random import Random

Prompt = tuple[int, ...]


class Prompts:
    """Draws token ids of a vocabulary, all of them equally often."""

    def __init__(self, vocab_size: int, random: Random | None = None) -> None:
        self._vocab_size = vocab_size
        self._random = random or Random()  # noqa: S311  # no secrets

    def one(self, num_tokens: int) -> Prompt:
        """A new prompt."""
        return tuple(self._random.choices(range(self._vocab_size), k=num_tokens))

    def many(self, num_prompts: int, num_tokens: int) -> tuple[Prompt, ...]:
        """New prompts of one length."""
        return tuple(self.one(num_tokens) for _ in range(num_prompts))
