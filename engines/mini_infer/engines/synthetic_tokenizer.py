"""A tokenizer made of nothing, for random weights: every id of a vocabulary of any size has a piece of text.

Knows no model; needs no file and no network.
"""

from __future__ import annotations

from itertools import islice, product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfghjklmnprstvwz" for vowel in "aeiou")
_SPACE = "Ġ"  # how byte-level tokenizers write a space


def synthetic_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose ids are 256 bytes, three special tokens, and made-up words up to ``vocab_size``.

    A made-up word in a text becomes its own id; everything else falls to bytes, so that every text survives the
    way to ids and back.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"a synthetic vocabulary needs at least {MIN_VOCAB_SIZE} ids, not {vocab_size}")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS, *_words(vocab_size - MIN_VOCAB_SIZE)]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    # ignore_merges: a word that is in the vocabulary is taken whole, though no merge leads to it.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _words(count: int) -> list[str]:
    num_syllables = 2
    while len(_SYLLABLES) ** num_syllables < count:
        num_syllables += 1
    words = (_SPACE + "".join(syllables) for syllables in product(_SYLLABLES, repeat=num_syllables))
    return list(islice(words, count))
