import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import TEXTS, ZOO, sentencepiece_like, slow_byte_level, word_level
from tokenizers import decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mini_infer.engines.text_decoder import MAX_HELD_RUN_BYTES, MAX_HELD_TOKENS, TextDecoder
from mini_infer.engines.token_bytes import TokenTable

TOKENIZERS = {name: build() for name, build in ZOO.items()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
LETTERS = "".join(TEXTS) + "ដ👍🏽\u200d🧑👩👧🇹🇭\ufffd▁\x00"  # combining marks, joiners, flags, unknown to SP
BROKEN = "\ufffd"


def full_decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip: bool = True) -> str:
    known = [token_id for token_id in ids if tokenizer.is_fast or token_id < len(tokenizer)]  # slow ones raise
    text = tokenizer.decode(known, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def deltas_of(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = TextDecoder(tokenizer, skip_special_tokens=skip)
    return [*map(decoder.step, ids), decoder.flush()]


def check(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip: bool = True) -> None:
    deltas, full = deltas_of(tokenizer, ids, skip=skip), full_decode(tokenizer, ids, skip=skip)
    assert "".join(deltas) == full
    assert BROKEN in full or not any(BROKEN in delta for delta in deltas)
    "".join(deltas).encode()  # each is whole: no lone surrogate


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@every_tokenizer
@pytest.mark.parametrize(
    "text", [*TEXTS, "🧑‍👩‍👧‍👦 family, 👍🏽, 🇹🇭", "  two  spaces .  And , some ! \n\n   \n ", "a\ufffdb\ufffd"]
)
def test_joined_text_is_the_full_decode_wherever_the_answer_is_cut(tokenizer, text):
    ids = encode(tokenizer, text)
    for num_ids in range(len(ids) + 1):
        check(tokenizer, ids[:num_ids])


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_random_ids_give_the_full_decode(tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 20), max_size=MAX_HELD_RUN_BYTES))
    check(tokenizer, ids, skip=skip)


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
def test_random_text_cut_anywhere_gives_the_full_decode(tokenizer, data, skip):
    letters = st.one_of(st.sampled_from(LETTERS), st.characters(codec="utf-8"))
    words = data.draw(st.lists(st.text(letters, max_size=MAX_HELD_RUN_BYTES // 4), max_size=6))
    ids = encode(tokenizer, " ".join(words))
    check(tokenizer, ids[: data.draw(st.integers(0, len(ids)))], skip=skip)


@given(ids=st.lists(st.sampled_from([0x0A, 0x41, 0xC3, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF]), max_size=12))
def test_bytes_by_themselves_give_the_full_decode(ids):
    for name, offset in (("byte_level", 0), ("slow_byte_level", 0), ("sentencepiece_like", 3)):
        check(TOKENIZERS[name], [offset + byte for byte in ids])


@pytest.mark.parametrize("name", sorted(TOKENIZERS.keys() - {"word_level"}))  # which splits at spaces
def test_indentation_and_spaces_before_punctuation_survive(name):
    tokenizer, text = TOKENIZERS[name], "Dear Sam, I hope.\n    indented   , yes ."
    assert "".join(deltas_of(tokenizer, encode(tokenizer, text))) == text


@every_tokenizer
def test_unknown_ids_are_nothing_and_decoding_goes_on(tokenizer):
    words = encode(tokenizer, "fox"), encode(tokenizer, " jumps")
    unknown = [len(tokenizer) + 50, 1 << 31, 1 << 40, -1]
    with_unknown = "".join(deltas_of(tokenizer, [*unknown, *words[0], *unknown, *words[1], *unknown]))
    assert with_unknown == "".join(deltas_of(tokenizer, [*words[0], *words[1]])) != ""


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like", "slow_byte_level", "slow_sentencepiece"])
@pytest.mark.parametrize(
    "letters", ["abcdefghij", "ひらがなすべて", "ภาษาไทยไม่มีช่องว่าง", "안녕하세요한글", "大語言模型"]
)
def test_text_without_spaces_streams_letter_by_letter(name, letters):
    tokenizer = TOKENIZERS[name]
    ids = [token_id for letter in (letters * 60)[:60] for token_id in encode(tokenizer, letter)]
    given_out = deltas_of(tokenizer, ids)[:-1]
    assert sum(map(bool, given_out)) >= 50
    assert any(given_out[:5])


def test_a_character_of_four_tokens_comes_with_the_fourth():
    assert deltas_of(TOKENIZERS["byte_level"], list("a👍b".encode())) == ["a", "", "", "", "👍", "b", ""]


def fallback_ids(text: bytes) -> list[int]:
    return [3 + byte for byte in text]


def test_a_short_run_of_byte_tokens_waits_until_it_is_known_to_be_whole():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    word = tokenizer.convert_tokens_to_ids("語")
    whole = deltas_of(tokenizer, [*fallback_ids("👍".encode()), word])
    assert whole == ["", "", "", "", "👍語", ""]
    broken = deltas_of(tokenizer, [*fallback_ids("👍".encode() + b"\xff"), word])
    assert broken == ["", "", "", "", BROKEN * 5, "語", ""]


def test_a_long_run_of_byte_tokens_streams_and_keeps_its_whole_characters():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    text = "ដ" * 40
    deltas = deltas_of(tokenizer, fallback_ids(text.encode()))
    assert "".join(deltas) == text
    assert not any(deltas[:MAX_HELD_RUN_BYTES])
    assert sum(map(bool, deltas)) > 30
    cut = deltas_of(tokenizer, fallback_ids(text.encode()[:-1]))
    assert "".join(cut) == text[:-1] + BROKEN * 2


def test_after_a_broken_run_nothing_is_held_any_more():
    deltas = deltas_of(TOKENIZERS["sentencepiece_like"], fallback_ids(b"\xff" * 100))
    assert deltas == [BROKEN] * 100 + [""]


@pytest.mark.parametrize("tokenizer", [slow_byte_level(), word_level()], ids=["slow", "word_level"])
@pytest.mark.parametrize("token_id", [255, 1, 600], ids=["broken", "special or broken", "unknown"])
def test_without_a_scheme_each_step_decodes_a_bounded_window(tokenizer, token_id, monkeypatch):
    num_decoded = []
    decode = TokenTable.decode

    def counting_decode(table: TokenTable, ids: list[int]) -> str:
        num_decoded.append(len(ids))
        return decode(table, ids)

    monkeypatch.setattr(TokenTable, "decode", counting_decode)
    deltas_of(tokenizer, [token_id] * 1000)
    assert max(num_decoded, default=0) <= 2 * MAX_HELD_TOKENS


def test_other_decoders_are_decoded_exactly_too():
    for decoder in (decoders.Metaspace(), decoders.WordPiece(), decoders.BPEDecoder(), decoders.Fuse()):
        tokenizer = sentencepiece_like()
        tokenizer.backend_tokenizer.decoder = decoder
        ids = encode(tokenizer, TEXTS[0] + TEXTS[2])
        assert "".join(deltas_of(tokenizer, ids)) == full_decode(tokenizer, ids)


def test_a_class_that_changes_the_text_in_python_is_heard():
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return super()._decode(*args, **kwargs).upper()

    tokenizer = Loud(tokenizer_object=sentencepiece_like().backend_tokenizer)
    assert "".join(deltas_of(tokenizer, encode(tokenizer, "lazy dog"))) == "LAZY DOG"
