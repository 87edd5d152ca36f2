import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import build_model
from support.tokenizers import BIG_TOKEN_ID, BIG_TOKEN_TEXT, TEXTS, ZOO, byte_level
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from mini_infer.engines.api import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    OutputOptions,
    PreparedRequest,
    Sampling,
    StopConditions,
    StreamEvent,
    StreamTimes,
    TokenLogprob,
    Usage,
)
from mini_infer.engines.errors import EngineFailed, StreamFailed
from mini_infer.engines.streamer import TokenStreamer
from mini_infer.engines.text_decoder import MAX_HELD_RUN_BYTES
from mini_infer.engines.token_bytes import TokenTable

TOKENIZERS = {name: build() for name, build in ZOO.items()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
BYTE = TOKENIZERS["byte_level"]
EOS, START, END = 256, 257, 258  # of BYTE
WAIT_S = 30.0


def prepared(
    *,
    eos: Iterable[int] = (EOS,),
    limit: FinishReason = FinishReason.MAX_NEW_TOKENS,
    output: OutputOptions = OutputOptions(),
    max_new_tokens: int = 10_000,
    **stop: Any,
) -> PreparedRequest:
    return PreparedRequest(
        key="k",
        prompt_ids=(1, 2, 3),
        sampling=Sampling(seed=7),
        stop=StopConditions(max_new_tokens=max_new_tokens, **stop),
        eos_token_ids=frozenset(eos),
        limit_reason=limit,
        output=output,
    )


def ticking() -> Callable[[], int]:
    """A clock that reads 10, 20, 30, ... ns."""
    return itertools.count(10, 10).__next__


def bound(
    request: PreparedRequest, tokenizer: PreTrainedTokenizerBase = BYTE
) -> tuple[TokenStreamer, list[StreamEvent]]:
    events: list[StreamEvent] = []
    return TokenStreamer(tokenizer, request=request, sink=events.append, clock=ticking()), events


def run(ids: Iterable[int], tokenizer: PreTrainedTokenizerBase = BYTE, **request: Any) -> list[StreamEvent]:
    """All events of a stream that is given ids until it wants no more, or is cancelled after the last."""
    streamer, events = bound(prepared(**request), tokenizer)
    for token_id in ids:
        streamer.push(token_id)
        if streamer.finished:
            break
    streamer.finish(FinishReason.CANCELLED)
    return events


def text_of(events: Sequence[StreamEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def end_of(events: Sequence[StreamEvent]) -> Finished:
    (end,) = (event for event in events if isinstance(event, Finished | Failed))
    assert end is events[-1]
    assert isinstance(end, Finished)
    return end


def outcome(events: Sequence[StreamEvent]) -> tuple[str, FinishReason, int | str | None, int]:
    end = end_of(events)
    return text_of(events), end.reason, end.matched, end.usage.completion_tokens


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def full_decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool = True) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


# --- text -----------------------------------------------------------------------------------------------------------


@every_tokenizer
@pytest.mark.parametrize("text", TEXTS)
def test_joined_deltas_are_the_full_decode(tokenizer, text):
    ids = encode(tokenizer, text)
    events = run(ids, tokenizer, eos=())
    assert text_of(events) == full_decode(tokenizer, ids)
    assert [i for event in events if isinstance(event, Delta) for i in event.token_ids] == ids
    assert all(event.text for event in events if isinstance(event, Delta))


@every_tokenizer
@given(data=st.data())
def test_random_ids_with_and_without_a_reader_give_the_same_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=MAX_HELD_RUN_BYTES))
    skip = data.draw(st.booleans())
    events = run(ids, tokenizer, eos=(), output=OutputOptions(skip_special_tokens=skip))
    streamer = TokenStreamer(tokenizer, skip_special_tokens=skip)
    for token_id in ids:
        streamer.push(token_id)
    streamer.end()
    assert text_of(events) == "".join(streamer) == full_decode(tokenizer, ids, skip)


def test_no_delta_holds_a_broken_character_unless_the_answer_does():
    ids = list("a👍b".encode())
    for num_ids in range(len(ids) + 1):
        deltas = [event.text for event in run(ids[:num_ids]) if isinstance(event, Delta)]
        assert "".join(deltas) == full_decode(BYTE, ids[:num_ids])
        assert not any("\ufffd" in text for text in deltas[:-1])


@pytest.mark.parametrize("letters", ["abcdefghij", "ひらがなすべて", "ภาษาไทยไม่มีช่องว่าง", "안녕하세요한글"])
def test_text_without_spaces_streams_and_its_first_text_is_stamped(letters):
    text = (letters * 60)[:60]
    ids = list(text.encode())
    streamer, events = bound(prepared(max_new_tokens=len(ids)))
    for token_id in ids:
        streamer.push(token_id)
    assert sum(bool(event.text) for event in events if isinstance(event, Delta)) >= 50
    end = end_of(events)
    assert end.times.first_token_ns == 10
    assert end.times.first_text_ns == 10 * len(letters[0].encode())
    assert text_of(events) == text


def test_a_stream_without_text_stamps_a_first_token_but_no_first_text():
    end = end_of(run([START, START, 300, EOS]))
    assert end.times == StreamTimes(None, 10, None, 40, 10, 4)
    assert end.usage == Usage(3, 4)


def test_a_token_of_two_kilobytes_is_one_delta():
    events = run([BIG_TOKEN_ID, EOS], TOKENIZERS["big_token"])
    assert [event.text for event in events if isinstance(event, Delta)] == [BIG_TOKEN_TEXT]


# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_id", [EOS, END, ord("!")])
def test_each_of_several_end_tokens_stops_and_none_is_shown(end_id):
    events = run([*b"abc", end_id, *b"more"], eos=(EOS, END, ord("!")))
    assert outcome(events) == ("abc", FinishReason.EOS, end_id, 4)


def test_end_tokens_are_run_past_where_they_are_ignored():
    events = run([*b"ab", EOS, *b"cd"], eos=(), max_new_tokens=5)
    assert outcome(events) == ("abcd", FinishReason.MAX_NEW_TOKENS, None, 5)


def test_special_text_is_shown_where_asked_for():
    shown = OutputOptions(skip_special_tokens=False)
    assert outcome(run([START, *b"ab", EOS], output=shown)) == ("<|im_start|>ab<|endoftext|>", FinishReason.EOS, EOS, 4)
    assert text_of(run([START, *b"ab", EOS])) == "ab"


def test_answer_text_that_spells_a_marker_is_kept():
    assert text_of(run([*b"<|im_end|>", EOS])) == "<|im_end|>"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
def test_a_stop_token_is_shown_only_where_asked_for(include, text):
    events = run(b"ab!cd", token_ids=(ord("!"),), include_stop_string=include)
    assert outcome(events) == (text, FinishReason.STOP_TOKEN, ord("!"), 3)


def test_nothing_stops_before_the_minimum():
    for stop in ({"token_ids": (ord("!"),)}, {"strings": ("!",)}, {"eos": (EOS, ord("!"))}):
        events = run(b"!!!!!!", min_new_tokens=4, **stop)
        assert text_of(events) == "!!!"
        assert end_of(events).usage.completion_tokens == 4


def test_a_stop_string_must_end_at_the_minimum_or_later_but_may_begin_before():
    assert outcome(run(b"xSTOPySTOP", strings=("STOP",), min_new_tokens=5))[3] == 5
    assert outcome(run(b"xSTOPySTOP", strings=("STOP",), min_new_tokens=6)) == (
        "xSTOPy",
        FinishReason.STOP_STRING,
        "STOP",
        10,
    )


def test_running_into_the_limit_gives_the_limits_own_reason():
    assert outcome(run(b"abcdef", max_new_tokens=3)) == ("abc", FinishReason.MAX_NEW_TOKENS, None, 3)
    events = run(b"abcdef", max_new_tokens=3, limit=FinishReason.CONTEXT_LENGTH)
    assert end_of(events).reason is FinishReason.CONTEXT_LENGTH


def test_at_the_last_token_an_end_goes_before_the_limit():
    assert end_of(run([*b"ab", EOS], max_new_tokens=3)).reason is FinishReason.EOS
    assert end_of(run(b"ab!", max_new_tokens=3, token_ids=(ord("!"),))).reason is FinishReason.STOP_TOKEN
    assert end_of(run(b"ab!", max_new_tokens=3, strings=("!",))).reason is FinishReason.STOP_STRING
    both = run(b"ab!", eos=(ord("!"),), token_ids=(ord("!"),), strings=("!",), max_new_tokens=3)
    assert end_of(both).reason is FinishReason.EOS


def test_text_held_back_is_cut_by_a_stop_string_even_at_the_end():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")  # a byte token, whose text waits for the next token
    ids = [*encode(tokenizer, "a"), newline, 2]
    assert outcome(run(ids, tokenizer, eos=(2,), strings=("\n",))) == ("a", FinishReason.STOP_STRING, "\n", len(ids))
    assert outcome(run(ids[:-1], tokenizer, strings=("\n",), max_new_tokens=len(ids) - 1))[:2] == (
        "a",
        FinishReason.STOP_STRING,
    )


def test_text_held_back_from_before_the_minimum_does_not_stop_at_the_end_token():
    tokenizer = TOKENIZERS["sentencepiece_like"]
    newline = tokenizer.convert_tokens_to_ids("<0x0A>")
    for minimum, expected in ((1, ("", FinishReason.STOP_STRING)), (2, ("\n", FinishReason.EOS))):
        events = run([newline, 2], tokenizer, eos=(2,), strings=("\n",), min_new_tokens=minimum)
        assert outcome(events)[:2] == expected


@every_tokenizer
@pytest.mark.parametrize("include", [False, True])
@given(data=st.data())
def test_stop_strings_cut_anywhere_agree_with_the_naive_search(tokenizer, include, data):
    ids = encode(tokenizer, data.draw(st.sampled_from(TEXTS)))
    text = full_decode(tokenizer, ids)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 12))]
    events = run(ids, tokenizer, eos=(), strings=(stop, "not there"), include_stop_string=include)
    assert outcome(events)[:3] == (
        text[: text.index(stop)] + stop * include,
        FinishReason.STOP_STRING,
        stop,
    )


def test_text_held_back_for_a_stop_string_is_released_at_the_end():
    for ids, reason in ((b"abST", FinishReason.CANCELLED), ([*b"abST", EOS], FinishReason.EOS)):
        events = run(ids, strings=("STOP",))
        assert outcome(events)[:2] == ("abST", reason)
        assert [event.text for event in events if isinstance(event, Delta)] == ["a", "b", "ST"]


def test_ids_after_the_end_are_ignored():
    streamer, events = bound(prepared())
    for token_id in (*b"ab", EOS, *b"cd", EOS):
        streamer.push(token_id)
    streamer.put(torch.tensor([5]))
    assert outcome(events) == ("ab", FinishReason.EOS, EOS, 3)


# --- events ---------------------------------------------------------------------------------------------------------


def test_deltas_count_tokens_and_the_first_carries_the_first_token_time():
    streamer, events = bound(prepared())
    streamer.answer.admitted_ns = 5
    for token_id in (*"é!".encode(), EOS):
        streamer.push(token_id)
    assert events == [
        Delta("k", "é", (0xC3, 0xA9), 2, 20, (), 10),
        Delta("k", "!", (0x21,), 3, 30),
        Finished("k", FinishReason.EOS, Usage(3, 4), StreamTimes(5, 10, 20, 40, 10, 4), EOS, 7),
    ]


@pytest.mark.parametrize("output", [OutputOptions(token_ids=True), OutputOptions(logprobs=True)])
def test_every_token_is_a_delta_where_ids_or_logprobs_are_asked_for(output):
    events = run([*"é!".encode(), START, EOS], output=output)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("", (0xC3,)),
        ("é", (0xA9,)),
        ("!", (0x21,)),
        ("", (START,)),
        ("", (EOS,)),
    ]
    assert [delta.first_token_ns for delta in deltas] == [10, None, None, None, None]


def test_held_text_alone_is_a_delta_of_no_tokens():
    events = run(b"a\xc3", output=OutputOptions(token_ids=True))
    assert events[-2] == Delta("k", "\ufffd", (), 2, 20)


def test_the_longest_gap_is_kept():
    times = iter([100, 110, 500, 510])
    streamer = TokenStreamer(BYTE, clock=times.__next__)
    for token_id in b"abcd":
        streamer.push(token_id)
    assert streamer.answer.times == StreamTimes(None, 100, 100, 510, 390, 4)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "slow_byte_level"])
@pytest.mark.parametrize("text", TEXTS)
def test_logprobs_are_one_per_token_and_their_bytes_the_text_before_the_cut(name, text):
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, text)
    full = full_decode(tokenizer, ids)
    stop = full[len(full) // 2 :][:5]
    table = TokenTable(tokenizer)
    streamer, events = bound(prepared(eos=(), strings=(stop,), output=OutputOptions(logprobs=True)), tokenizer)
    for token_id in ids:
        streamer.push(token_id, TokenLogprob(token_id, table.token_bytes(token_id), -1.0))
    deltas = [event for event in events if isinstance(event, Delta)]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    num_tokens = end_of(events).usage.completion_tokens
    assert [entry.token_id for entry in entries] == ids[:num_tokens]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    joined = b"".join(entry.token for entry in entries).decode(errors="ignore")
    assert joined.startswith(text_of(events) + stop)
    assert full.startswith(joined)


def test_events_never_change_later():
    streamer, events = bound(prepared(output=OutputOptions(logprobs=True)))
    early = []
    for token_id in b"abcdefghij":
        streamer.push(token_id, TokenLogprob(token_id, bytes([token_id]), -1.0))
        early.append(repr(events))
    streamer.finish(FinishReason.CANCELLED)
    assert [repr(events[: index + 1]) for index in range(10)] == early
    assert len({hash(event) for event in events}) == len(events)


def test_a_sink_needs_a_request_and_takes_the_place_of_a_reader():
    with pytest.raises(ValueError, match="needs a request"):
        TokenStreamer(BYTE, sink=print)
    streamer, _ = bound(prepared())
    with pytest.raises(TypeError, match="sink"):
        next(streamer)


# --- failing --------------------------------------------------------------------------------------------------------


def test_a_failing_stream_delivers_what_it_held_and_then_its_error():
    error = EngineFailed("the device is gone")
    streamer, events = bound(prepared(strings=("STOP",)))
    for token_id in b"abST":
        streamer.push(token_id)
    streamer.fail(error)
    assert text_of(events) == "abST"
    assert events[-1] == Failed("k", error, StreamTimes(None, 10, 10, 40, 10, 4))


def test_a_reader_gets_the_text_and_then_the_error_however_often_it_asks():
    streamer = TokenStreamer(BYTE)
    streamer.push(ord("a"))
    streamer.push(0xC3)
    streamer.fail(EngineFailed("gone"))
    assert [next(streamer), next(streamer)] == ["a", "\ufffd"]
    for _ in range(2):
        with pytest.raises(EngineFailed, match="gone"):
            next(streamer)


def test_a_reader_that_waits_is_woken_by_an_error():
    streamer, raised = TokenStreamer(BYTE), []

    def read() -> None:
        try:
            list(streamer)
        except EngineFailed as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    streamer.fail(EngineFailed("gone"))
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert len(raised) == 1


def test_a_reader_with_a_timeout_gets_an_error():
    streamer = TokenStreamer(BYTE, timeout=0.01)
    streamer.push(ord("a"))
    assert next(streamer) == "a"
    with pytest.raises(queue.Empty):
        next(streamer)


def test_a_finished_stream_stays_finished_for_its_reader():
    streamer = TokenStreamer(BYTE)
    streamer.push(ord("a"))
    streamer.end()
    assert list(streamer) == ["a"]
    assert list(streamer) == []


ENDINGS: dict[str, Callable[[TokenStreamer], None]] = {
    "finish": lambda streamer: streamer.finish(FinishReason.CANCELLED),
    "fail": lambda streamer: streamer.fail(EngineFailed("gone")),
    "end": lambda streamer: streamer.end(),
    "eos": lambda streamer: streamer.push(EOS),
}


@pytest.mark.parametrize("order", list(itertools.permutations(ENDINGS)))
def test_whatever_the_order_the_first_ending_is_the_only_one(order):
    streamer, events = bound(prepared())
    streamer.push(ord("a"))
    for name in order:
        ENDINGS[name](streamer)
        assert streamer.finished
    _, end = events
    expected = {"finish": FinishReason.CANCELLED, "eos": FinishReason.EOS}.get(order[0])
    assert isinstance(end, Finished) == (expected is not None)
    assert getattr(end, "reason", None) == expected


def test_generation_that_ends_before_the_answer_is_a_failure():
    streamer, events = bound(prepared())
    streamer.push(ord("a"))
    streamer.end()
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, StreamFailed)


@pytest.mark.parametrize("name", ENDINGS)
def test_a_race_of_tokens_and_endings_has_one_end_and_it_is_last(name):
    for _ in range(50):
        streamer, events = bound(prepared())
        barrier = threading.Barrier(3)

        def push(streamer: TokenStreamer = streamer, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(WAIT_S)
            for token_id in itertools.islice(itertools.cycle(b"ab\xc3\xa9"), 200):
                streamer.push(token_id)

        def end(streamer: TokenStreamer = streamer, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(WAIT_S)
            ENDINGS[name](streamer)

        threads = [threading.Thread(target=target) for target in (push, end, end)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        ends = [event for event in events if isinstance(event, Finished | Failed)]
        assert ends == events[-1:]
        ids = [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]
        assert len(ids) <= ends[0].times.num_tokens <= 201
        assert text_of(events).startswith(full_decode(BYTE, ids).rstrip("\ufffd"))


@pytest.mark.parametrize("name", ENDINGS)
def test_an_ending_waits_until_the_token_before_it_is_out(name):
    events: list[StreamEvent] = []

    def sink(event: StreamEvent) -> None:
        if isinstance(event, Delta):
            ender.start()
            ender.join(0.05)  # it cannot get through; were there no lock, it would
        events.append(event)

    streamer = TokenStreamer(BYTE, request=prepared(), sink=sink)
    ender = threading.Thread(target=ENDINGS[name], args=(streamer,))
    streamer.push(ord("a"))
    ender.join(WAIT_S)
    assert [type(event) for event in events] in ([Delta, Finished], [Delta, Failed])


def test_a_tokenizer_that_breaks_still_lets_the_stream_end(monkeypatch):
    tokenizer = ZOO["slow_byte_level"]()
    streamer, events = bound(prepared(), tokenizer)
    streamer.push(ord("a"))

    def broken(*_: object, **__: object) -> str:
        raise RuntimeError("a bug in remote code")

    monkeypatch.setattr(tokenizer, "decode", broken)
    with pytest.raises(RuntimeError):
        streamer.push(ord("b"))
    streamer.fail(EngineFailed("remote code broke"))
    assert text_of(events) == "a"
    assert isinstance(events[-1], Failed)


def test_a_tokenizer_that_breaks_at_the_very_end_still_lets_the_stream_end(monkeypatch):
    tokenizer = ZOO["slow_byte_level"]()
    streamer, events = bound(prepared(), tokenizer)
    streamer.push(0xC3)
    monkeypatch.setattr(tokenizer, "decode", None)
    with pytest.raises(TypeError):
        streamer.finish(FinishReason.CANCELLED)
    assert end_of(events).reason is FinishReason.CANCELLED


# --- model.generate -------------------------------------------------------------------------------------------------


def test_put_takes_what_generate_gives_the_prompt_first():
    for skip_prompt, expected in ((True, "cd"), (False, "abcd")):
        for of in (torch.tensor, np.array):
            streamer = TokenStreamer(BYTE, skip_prompt=skip_prompt)
            streamer.put(of([list(b"ab")]))
            streamer.put(of([ord("c")]))
            streamer.put(of(ord("d")))
            streamer.end()
            assert "".join(streamer) == expected
            assert streamer.answer.times.num_tokens == 2


def test_several_tokens_of_one_step_are_several_tokens():
    streamer, events = bound(prepared(max_new_tokens=3))
    streamer.put(torch.tensor([[1, 2]]))
    streamer.put(torch.tensor([list(b"abcde")]))
    assert outcome(events) == ("abc", FinishReason.MAX_NEW_TOKENS, None, 3)


def test_a_request_never_shows_its_prompt():
    streamer, events = bound(prepared())
    streamer.put(torch.tensor([[*b"ab", EOS]]))
    streamer.put(torch.tensor([ord("c")]))
    streamer.put(torch.tensor([EOS]))
    assert outcome(events) == ("c", FinishReason.EOS, EOS, 2)
    read = TokenStreamer(BYTE, request=prepared(max_new_tokens=1))
    read.put(torch.tensor([[*b"ab"]]))
    read.put(torch.tensor([ord("c")]))
    assert list(read) == ["c"]


def test_a_batch_is_refused_and_its_reader_told():
    streamer = TokenStreamer(BYTE, skip_prompt=True)
    with pytest.raises(ValueError, match="batch of 2"):
        streamer.put(torch.tensor([[1], [2]]))
    with pytest.raises(StreamFailed, match="batch of 2"):
        next(streamer)


def test_text_that_is_out_cannot_be_cleaned_up():
    TokenStreamer(BYTE, clean_up_tokenization_spaces=False)
    with pytest.raises(ValueError, match="clean_up"):
        TokenStreamer(BYTE, clean_up_tokenization_spaces=True)


@pytest.fixture(scope="module")
def model():
    return build_model("rand")


def generate(model: Any, streamer: TextIteratorStreamer, **options: Any) -> tuple[str, list[int]]:
    """Text read while another thread generates, and the ids that came after the prompt."""
    prompt, ids = torch.tensor([list(b"Hello")]), []

    def work() -> None:
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, streamer=streamer, do_sample=False, **options)
        ids.extend(output[0, prompt.shape[1] :].tolist())

    worker = threading.Thread(target=work)
    worker.start()
    text = "".join(streamer)
    worker.join(WAIT_S)
    return text, ids


@pytest.mark.floor
@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_it_takes_the_place_of_the_stock_streamer_under_generate(model, skip_prompt, skip):
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    streamer = TokenStreamer(BYTE, skip_prompt=skip_prompt, timeout=WAIT_S, skip_special_tokens=skip)
    text, ids = generate(model, streamer, **options)
    assert len(ids) == 60 == streamer.answer.times.num_tokens
    assert len(set(ids)) > 5, "a random model that repeats one id shows little"
    assert text == full_decode(BYTE, ids if skip_prompt else [*b"Hello", *ids], skip)
    stock = TextIteratorStreamer(BYTE, skip_prompt=skip_prompt, timeout=WAIT_S, skip_special_tokens=skip)
    assert generate(model, stock, **options)[1] == ids


class AskStreamer(StoppingCriteria):
    def __init__(self, streamer: TokenStreamer) -> None:
        self.streamer = streamer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.streamer.finished, dtype=torch.bool)


@pytest.mark.floor
def test_generate_stops_when_the_streamer_has_finished(model):
    _, ids = generate(model, TokenStreamer(BYTE), max_new_tokens=60, eos_token_id=None, pad_token_id=0)
    stop_id = next(token_id for token_id in ids[5:] if token_id not in ids[:5])
    events: list[StreamEvent] = []
    streamer = TokenStreamer(BYTE, request=prepared(eos=(stop_id,)), sink=events.append)
    model.generate(
        torch.tensor([list(b"Hello")]),
        attention_mask=torch.ones(1, 5, dtype=torch.int64),
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([AskStreamer(streamer)]),
        max_new_tokens=60,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = ids[: ids.index(stop_id)]
    assert outcome(events) == (full_decode(BYTE, expected), FinishReason.EOS, stop_id, len(expected) + 1)


def test_byte_is_what_these_tests_believe():
    assert byte_level().convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [EOS, START, END]
