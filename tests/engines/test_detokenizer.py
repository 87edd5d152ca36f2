import random
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from support.events import WAIT_S, Recorder, assert_lawful
from support.tokenizers import ZOO

from mini_infer.engines.api import (
    Event,
    Failed,
    Finished,
    FinishReason,
    OutputOptions,
    PreparedRequest,
    Sampling,
    Started,
    StopConditions,
    StreamTimes,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from mini_infer.engines.batch import Choice
from mini_infer.engines.detokenizer import Detokenizer
from mini_infer.engines.errors import EngineFailed, StreamFailed
from mini_infer.engines.streamer import TokenStreamer
from mini_infer.engines.token_bytes import TokenTable

BYTE = ZOO["byte_level"]()
EOS = 256  # of BYTE
GONE = EngineFailed("the device is gone")


def prepared(
    key: str, *, max_new_tokens: int = 10_000, output: OutputOptions = OutputOptions(), **stop: Any
) -> PreparedRequest:
    return PreparedRequest(
        key=key,
        prompt_ids=(1, 2, 3),
        sampling=Sampling(),
        stop=StopConditions(max_new_tokens=max_new_tokens, **stop),
        eos_token_ids=frozenset({EOS}),
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=output,
    )


class Desk(Recorder):
    """An owner's side: records events and what else the detokenizer calls, and can hold it up in ``emit``."""

    def __init__(self, tokenizer: Any = BYTE) -> None:
        super().__init__()
        self.rounds: list[list[str]] = []
        self.broken = threading.Event()
        self.emits = threading.Event()
        self.free = threading.Event()
        self.free.set()
        self.threads: set[str] = set()
        self.detokenizer = Detokenizer(
            "some/7", tokenizer, emit=self.emit, on_ended=self.on_ended, on_broken=self.broken.set
        )

    def emit(self, events: Sequence[Event]) -> None:
        self.threads.add(threading.current_thread().name)
        self.emits.set()
        assert self.free.wait(WAIT_S)
        self(events)

    def on_ended(self, keys: Sequence[str]) -> None:
        assert not any(self.ends(key) for key in keys), "a key is free again when its end is out"
        self.rounds.append(list(keys))

    def begin(self, request: PreparedRequest, admitted_ns: int = 5, num_cached_prompt_tokens: int = 0) -> None:
        self([Started(request.key, admitted_ns)])
        self.detokenizer.begin(request, admitted_ns, num_cached_prompt_tokens)

    def feed(self, key: str, ids: Iterable[int], at_ns: int = 10) -> None:
        for token_id in ids:
            self.detokenizer.push([(key, Choice(token_id))], at_ns)

    def hold_up(self) -> None:
        """Lets the thread stand in ``emit`` until ``free`` is set: what comes then waits, as one round."""
        self.free.clear()
        self.emits.clear()
        self.begin(prepared("brake"))
        self.feed("brake", b"!")
        assert self.emits.wait(WAIT_S)

    def close(self) -> None:
        self.free.set()
        assert self.detokenizer.close(WAIT_S)

    @property
    def ended(self) -> list[str]:
        return [key for keys in self.rounds for key in keys]


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def test_tokens_become_text_and_one_end_on_a_thread_of_their_own(desk):
    desk.begin(prepared("a"), num_cached_prompt_tokens=2)
    desk.feed("a", [*"é!".encode(), EOS])
    end = desk.wait_end("a")
    assert desk.text("a") == "é!"
    assert isinstance(end, Finished)
    assert (end.reason, end.matched, end.usage) == (FinishReason.EOS, EOS, Usage(3, 4, 2))
    assert_lawful(desk, "a")
    assert {name.rpartition("_")[0] for name in desk.threads} == {"some/7-text"}


def test_stamps_are_those_of_the_steps_however_late_the_text_is_made(desk):
    desk.begin(prepared("a"), admitted_ns=5)
    desk.hold_up()
    for at_ns, token_id in ((10, 0xC3), (30, 0xA9), (35, EOS)):
        desk.feed("a", [token_id], at_ns)
    desk.free.set()
    assert desk.wait_end("a").times == StreamTimes(5, 10, 30, 35, 20, 3)
    assert desk.deltas("a")[0].first_token_ns == 10


def test_all_that_waits_is_emitted_at_once(desk):
    for key in "abc":
        desk.begin(prepared(key))
    desk.hold_up()
    num_batches = len(desk.batches) + 1  # the one that stands in emit
    for letter in b"xyz":
        desk.detokenizer.push([(key, Choice(letter)) for key in "abc"], 10)
    desk.detokenizer.push([("a", Choice(EOS)), ("b", Choice(EOS))], 20)
    desk.free.set()
    desk.close()
    assert len(desk.batches) == num_batches + 1
    assert [desk.text(key) for key in "abc"] == ["xyz"] * 3
    assert desk.rounds == [["a", "b"]]


@pytest.mark.parametrize(
    ("ids", "stop", "reason"),
    [
        ([*b"ab", EOS], {}, FinishReason.EOS),
        (b"ab!", {"token_ids": (ord("!"),)}, FinishReason.STOP_TOKEN),
        (b"abcd", {"max_new_tokens": 3}, FinishReason.MAX_NEW_TOKENS),
        (b"abSTOP", {"strings": ("STOP",)}, FinishReason.STOP_STRING),
    ],
)
def test_the_engine_hears_of_every_stream_that_ends_by_itself(desk, ids, stop, reason):
    desk.begin(prepared("a", **stop))
    desk.feed("a", ids)
    assert desk.wait_end("a").reason is reason
    desk.close()
    assert desk.ended == ["a"]


def test_what_was_ended_from_outside_is_not_told_back(desk):
    for key in "abc":
        desk.begin(prepared(key))
        desk.feed(key, b"xy")
    desk.detokenizer.finish("a", FinishReason.CANCELLED)
    desk.detokenizer.fail("b", GONE)
    desk.detokenizer.fail_all(GONE)
    desk.close()
    assert [getattr(desk.ends(key)[0], "reason", None) for key in "abc"] == [FinishReason.CANCELLED, None, None]
    for key in "abc":
        assert desk.text(key) == "xy"
        assert_lawful(desk, key)
    assert not desk.ended


def test_what_comes_after_the_end_or_was_never_begun_is_ignored(desk):
    desk.begin(prepared("a"))
    desk.feed("a", [*b"x", EOS, *b"more", EOS])
    desk.feed("nobody", b"x")
    for key in ("a", "nobody"):
        desk.detokenizer.finish(key, FinishReason.CANCELLED)
        desk.detokenizer.fail(key, GONE)
    desk.close()
    assert_lawful(desk, "a")
    assert desk.text("a") == "x"
    assert desk.ended == ["a"]
    assert not desk.events("nobody")


def test_a_choice_with_an_error_fails_its_stream_alone(desk):
    desk.begin(prepared("a"))
    desk.begin(prepared("b"))
    desk.detokenizer.push([("a", Choice(-1, error="logits are no numbers")), ("b", Choice(ord("x")))], 10)
    desk.feed("b", [EOS])
    assert isinstance(desk.wait_end("b"), Finished)
    end = desk.wait_end("a")
    assert isinstance(end, Failed)
    assert isinstance(end.error, StreamFailed)
    assert end.error.message == "logits are no numbers"
    assert end.times.num_tokens == 0


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like", "slow_byte_level"])
def test_logprob_entries_hold_the_bytes_of_the_tokens_and_of_their_rivals(name):
    desk = Desk(ZOO[name]())
    tokenizer = desk.detokenizer._tokenizer
    hello, world = (tokenizer(text, add_special_tokens=False).input_ids[-1] for text in ("Hello", "world"))
    desk.begin(prepared("a", output=OutputOptions(logprobs=True, top_logprobs=2)))
    desk.detokenizer.push([("a", Choice(hello, -0.5, ((hello, -0.5), (world, -2.0))))], 10)
    desk.close()
    (entry,) = desk.deltas("a")[0].logprobs
    assert (entry.token_id, entry.logprob) == (hello, -0.5)
    assert [(rival.token_id, rival.logprob) for rival in entry.top] == [(hello, -0.5), (world, -2.0)]
    assert all(isinstance(rival, TopLogprob) and rival.token for rival in entry.top)
    alone: list[Event] = []
    streamer = TokenStreamer(tokenizer, request=prepared("a", output=OutputOptions(logprobs=True)), sink=alone.append)
    bytes_of = TokenTable(tokenizer).token_bytes
    rivals = (TopLogprob(hello, bytes_of(hello), -0.5), TopLogprob(world, bytes_of(world), -2.0))
    streamer.push(hello, TokenLogprob(hello, bytes_of(hello), -0.5, rivals))
    assert alone[0].logprobs == (entry,)


# --- when something breaks ------------------------------------------------------------------------------------------


def breaking(monkeypatch: pytest.MonkeyPatch, bad_id: int, error: Exception) -> Any:
    """A tokenizer whose own code raises as soon as one id is to be decoded."""
    tokenizer = ZOO["slow_byte_level"]()
    decode = tokenizer.decode

    def broken(token_ids: Sequence[int], **options: Any) -> str:
        if bad_id in list(token_ids):
            raise error
        return str(decode(token_ids, **options))

    monkeypatch.setattr(tokenizer, "decode", broken)
    return tokenizer


def test_a_tokenizer_that_raises_ends_one_stream(monkeypatch, caplog):
    desk = Desk(breaking(monkeypatch, ord("!"), RuntimeError("a bug in remote code")))
    desk.begin(prepared("bad"))
    desk.begin(prepared("good"))
    for letters in zip(b"x!y", b"abc", strict=True):
        desk.detokenizer.push([("bad", Choice(letters[0])), ("good", Choice(letters[1]))], 10)
    desk.detokenizer.finish("good", FinishReason.CANCELLED)
    desk.close()
    end = desk.ends("bad")[0]
    assert isinstance(end, Failed)
    assert isinstance(end.error, StreamFailed)
    assert "a bug in remote code" in end.error.message
    assert desk.text("bad") == "x"
    assert desk.text("good") == "abc"
    for key in ("bad", "good"):
        assert_lawful(desk, key)
    assert desk.ended == ["bad"]
    assert "a bug in remote code" in caplog.text


@pytest.mark.parametrize("ending", ["finish", "fail"])
def test_a_tokenizer_that_raises_at_the_very_end_loses_no_end(monkeypatch, ending):
    desk = Desk(ZOO["slow_byte_level"]())
    desk.begin(prepared("a"))
    desk.feed("a", [ord("x"), 0xC3])
    desk.wait_tokens("a", 1)
    monkeypatch.setattr(desk.detokenizer._tokenizer, "decode", None)
    if ending == "finish":
        desk.detokenizer.finish("a", FinishReason.CANCELLED)
    else:
        desk.detokenizer.fail("a", GONE)
    desk.close()
    assert_lawful(desk, "a")


def test_a_request_that_no_streamer_takes_fails_alone(desk):
    desk.begin(prepared("bad", strings=("",)), admitted_ns=7)
    desk.begin(prepared("good"))
    desk.feed("bad", b"x")
    desk.feed("good", [*b"x", EOS])
    assert isinstance(desk.wait_end("good"), Finished)
    end = desk.wait_end("bad")
    assert isinstance(end, Failed)
    assert isinstance(end.error, StreamFailed)
    assert end.times.admitted_ns == 7
    desk.close()
    assert sorted(desk.ended) == ["bad", "good"]
    assert_lawful(desk, "bad")


@pytest.mark.parametrize("error", [ValueError("the reader is gone"), SystemExit(3)])
def test_an_emit_that_raises_ends_the_work_and_is_told_once(caplog, error):
    calls, broken = [], threading.Semaphore(0)

    def emit(events: Sequence[Event]) -> None:
        calls.append(list(events))
        raise error

    ended: list[str] = []
    detokenizer = Detokenizer("e", BYTE, emit=emit, on_ended=ended.extend, on_broken=broken.release)
    detokenizer.begin(prepared("a"), 5, 0)
    detokenizer.push([("a", Choice(EOS))], 10)
    assert broken.acquire(timeout=WAIT_S)
    assert detokenizer.error is error
    detokenizer.push([("a", Choice(EOS))], 20)
    detokenizer.fail_all(GONE)
    assert detokenizer.close(WAIT_S)
    assert len(calls) == 1
    assert ended == ["a"]
    assert not broken.acquire(blocking=False)
    assert "its texts reach nobody" in caplog.text


# --- closing --------------------------------------------------------------------------------------------------------


def test_close_works_off_what_waits_and_then_takes_nothing(desk):
    desk.begin(prepared("a"))
    desk.hold_up()
    desk.feed("a", b"0123456789" * 50)
    desk.detokenizer.fail_all(GONE)
    desk.close()
    assert len(desk.text("a")) == 500
    assert_lawful(desk, "a")
    desk.begin(prepared("late"))
    desk.feed("late", [EOS])
    desk.close()
    assert not desk.ends("late")
    assert not any(thread.name.startswith("some/7-text") for thread in threading.enumerate())


def test_close_leaves_a_thread_behind_that_hangs(desk):
    desk.hold_up()
    assert not desk.detokenizer.close(0.05)
    desk.feed("brake", b"more")
    desk.close()
    assert desk.text("brake") == "!"


def test_close_before_any_work():
    Desk().close()


def test_a_process_that_forgets_to_close_can_exit_and_its_last_stream_is_whole():
    code = """
import sys, threading
sys.path.insert(0, "tests")
from engines.test_detokenizer import BYTE, EOS, Choice, Detokenizer, prepared
main = threading.main_thread()
def emit(events):
    print("".join(getattr(event, "text", ".") for event in events), end="", flush=True)
detokenizer = Detokenizer("e", BYTE, emit=emit, on_ended=lambda keys: None, on_broken=lambda: print("broken"))
detokenizer.begin(prepared("forgotten"), 5, 0)
def own():
    main.join()  # until the process exits, when no executor starts a task any more
    for token_id in (*b"whole", EOS):
        detokenizer.push([("forgotten", Choice(token_id))], 10)
threading.Thread(target=own).start()
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole."), done.stderr


# --- many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_many_streams_in_any_order_of_calls_get_what_each_would_get_alone(seed):
    rng = random.Random(seed)
    desk = Desk()
    alone: dict[str, tuple[TokenStreamer, list[Event]]] = {}
    for step in range(300):
        if rng.random() < 0.3:
            request = prepared(f"{step}", max_new_tokens=rng.randint(1, 40), strings=("zz",))
            events: list[Event] = []
            alone[request.key] = TokenStreamer(BYTE, request=request, sink=events.append), events
            desk.begin(request)
        keys = rng.sample(list(alone), rng.randint(0, len(alone)))
        tokens = [(key, Choice(EOS if rng.random() < 0.02 else rng.choice(b"abcdz"))) for key in keys]
        desk.detokenizer.push(tokens, step)
        for key, choice in tokens:
            alone[key][0].push(choice.token_id, at_ns=step)
        for end, outcome in (("finish", FinishReason.CANCELLED), ("fail", GONE)):
            if alone and rng.random() < 0.1:
                key = rng.choice(list(alone))
                getattr(desk.detokenizer, end)(key, outcome)
                getattr(alone[key][0], end)(outcome)
    desk.detokenizer.fail_all(GONE)
    desk.close()
    for key, (streamer, events) in alone.items():
        streamer.fail(GONE)
        assert_lawful(desk, key)
        assert [_told(event) for event in desk.events(key)[1:]] == [_told(event) for event in events]
    assert len(desk.ended) == len(set(desk.ended))
    reasons = {getattr(desk.ends(key)[0], "reason", None) for key in alone}
    assert len(reasons) == 5, "every kind of end is seen"


def _told(event: Event) -> tuple[object, ...]:
    """An event without the instants that only a clock tells."""
    names = ("text", "token_ids", "cumulative_tokens", "at_ns", "reason", "matched", "usage", "error")
    return type(event), *(getattr(event, name, None) for name in names)


def test_thousands_of_streams_leave_nothing_behind(desk):
    for number in range(3000):
        key = f"{number}"
        desk.begin(prepared(key, max_new_tokens=2))
        desk.detokenizer.push([(key, Choice(ord("a")))], 10)
        if number % 3 == 0:
            desk.detokenizer.finish(key, FinishReason.CANCELLED)
        else:
            desk.detokenizer.push([(key, Choice(ord("b")))], 20)
    desk.close()
    assert len(desk.ended) == 2000
    assert sum(isinstance(event, Finished) for event in desk.events()) == 3000
    assert not desk.detokenizer._streamers
    assert not desk.detokenizer._waiting
    assert not desk.detokenizer._events
