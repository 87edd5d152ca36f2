import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import BIG_TOKEN_ID, BIG_TOKEN_TEXT, TEXTS, ZOO, big_token, byte_level, sentencepiece_like
from tokenizers import decoders

from mini_infer.engines.token_bytes import Scheme, TokenTable, scheme_of

TOKENIZERS = {name: build() for name, build in ZOO.items()}


def token_bytes(tokenizer, token_id, *, skip_special_tokens=True):
    return TokenTable(tokenizer, skip_special_tokens=skip_special_tokens).token_bytes(token_id)


def joined(tokenizer, ids, *, skip=True):
    table = TokenTable(tokenizer, skip_special_tokens=skip)
    standing = [token_id for token_id in ids if table.token(token_id) is not None]
    return b"".join(table.token_bytes(token_id, first=index == 0) for index, token_id in enumerate(standing))


@pytest.mark.parametrize(
    ("name", "text"),
    # Without a scheme, part of a character has no bytes of its own.
    [(name, text) for name in TOKENIZERS for text in TEXTS if name != "slow_byte_level" or text.isascii()],
)
@pytest.mark.parametrize("skip", [True, False])
def test_joined_bytes_are_the_text(name, text, skip):
    tokenizer = TOKENIZERS[name]
    ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert joined(tokenizer, ids, skip=skip).decode() == text


@given(st.data())
def test_joined_bytes_of_random_ids_decode_to_the_text(data):
    tokenizer = TOKENIZERS["byte_level_bpe"]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 20)))
    assert joined(tokenizer, ids).decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=True)


def test_each_kind_of_token_has_its_own_bytes():
    assert token_bytes(byte_level(), 0xE4) == b"\xe4"
    assert token_bytes(byte_level(), 0x20) == b" "
    assert token_bytes(byte_level(), 256) == b""
    assert token_bytes(byte_level(), 256, skip_special_tokens=False) == b"<|endoftext|>"
    assert token_bytes(byte_level(), 350) == b""
    assert token_bytes(big_token(), BIG_TOKEN_ID) == BIG_TOKEN_TEXT.encode()
    tokenizer = sentencepiece_like()
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<0xE4>")) == b"\xe4"
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("▁do")) == b" do"
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("語")) == "語".encode()


def test_an_added_token_outside_the_byte_alphabet_keeps_its_text():
    tokenizer = byte_level()
    tokenizer.add_tokens(["two words ✓"])
    assert token_bytes(tokenizer, len(tokenizer) - 1) == "two words ✓".encode()
    assert tokenizer.decode([len(tokenizer) - 1]) == "two words ✓"


@pytest.mark.parametrize(
    ("decoder", "scheme"),
    [
        (decoders.ByteLevel(), Scheme(byte_level=True)),
        (decoders.Sequence([decoders.ByteLevel()]), Scheme(byte_level=True)),
        (  # Gemma
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            Scheme(False, (("▁", " "),), byte_fallback=True),
        ),
        (  # Llama 2
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            Scheme(False, (("▁", " "),), byte_fallback=True, strip_left=1),
        ),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), None),
        (decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]), None),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), None),
        (decoders.Metaspace(), None),
        (decoders.WordPiece(), None),
    ],
)
def test_the_scheme_is_read_off_the_decoder_or_not_at_all(decoder, scheme):
    tokenizer = sentencepiece_like()
    tokenizer.backend_tokenizer.decoder = decoder
    assert scheme_of(tokenizer) == scheme
