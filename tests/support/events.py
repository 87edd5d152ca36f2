"""What an engine emitted, kept in order, with ways to wait for it."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mini_infer.engines.api import (
    Delta,
    Engine,
    EngineState,
    Event,
    Failed,
    Finished,
    OutputOptions,
    Request,
    Sampling,
    Started,
    StateChanged,
    StopConditions,
)

WAIT_S = 20.0


@dataclass
class Recorder:
    """An `Emit` that keeps everything; ``batches`` has one entry for each call."""

    batches: list[list[Event]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.batches.append(list(events))
            self._changed.notify_all()

    def events(self, key: str | None = None) -> list[Event]:
        with self._changed:
            every = [event for batch in self.batches for event in batch]
        return every if key is None else [e for e in every if not isinstance(e, StateChanged) and e.key == key]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), f"never came; so far: {self.batches[-5:]}"

    def wait_state(self, state: EngineState) -> StateChanged:
        def seen() -> list[StateChanged]:
            return [e for e in self.events() if isinstance(e, StateChanged) and e.state is state]

        self.wait_for(lambda: bool(seen()))
        return seen()[-1]

    def wait_end(self, key: str) -> Finished | Failed:
        self.wait_for(lambda: bool(self.ends(key)))
        return self.ends(key)[0]

    def wait_started(self, key: str) -> Started:
        self.wait_for(lambda: any(isinstance(e, Started) for e in self.events(key)))
        return next(e for e in self.events(key) if isinstance(e, Started))

    def wait_tokens(self, key: str, num_tokens: int) -> None:
        self.wait_for(lambda: self.num_tokens(key) >= num_tokens)

    def num_tokens(self, key: str) -> int:
        return max((e.cumulative_tokens for e in self.events(key) if isinstance(e, Delta)), default=0)

    def ends(self, key: str) -> list[Finished | Failed]:
        return [e for e in self.events(key) if isinstance(e, Finished | Failed)]

    def deltas(self, key: str) -> list[Delta]:
        return [e for e in self.events(key) if isinstance(e, Delta)]

    def text(self, key: str) -> str:
        return "".join(delta.text for delta in self.deltas(key))

    def ids(self, key: str) -> list[int]:
        return [token_id for delta in self.deltas(key) for token_id in delta.token_ids]


def up(engine: Engine) -> Recorder:
    """Starts an engine and waits until it is READY."""
    recorder = Recorder()
    engine.start(recorder)
    recorder.wait_for(lambda: engine.state in (EngineState.READY, EngineState.FAILED))
    assert engine.state is EngineState.READY, recorder.events()
    recorder.wait_state(EngineState.READY)
    return recorder


def ask(
    engine: Engine,
    key: str,
    prompt: str | tuple[int, ...] = "Hello",
    *,
    sampling: Sampling = Sampling(),
    stop: StopConditions = StopConditions(),
    output: OutputOptions = OutputOptions(token_ids=True),
    deadline_ns: int | None = None,
) -> None:
    """Prepares a request and submits it."""
    source = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    request = Request(key=key, sampling=sampling, stop=stop, output=output, deadline_ns=deadline_ns, **source)
    engine.submit(engine.text.prepare(request))


def assert_lawful(recorder: Recorder, key: str) -> None:
    """The order of events that every stream owes: Started at most once, deltas, one end, nothing after it."""
    events = recorder.events(key)
    assert len(recorder.ends(key)) == 1, events
    assert isinstance(events[-1], Finished | Failed), events
    starts = [i for i, e in enumerate(events) if isinstance(e, Started)]
    assert starts in ([], [0]), events
    assert starts or len(events) == 1, events
    counts = [e.cumulative_tokens for e in events if isinstance(e, Delta)]
    assert counts == sorted(counts)
    firsts = [i for i, e in enumerate(recorder.deltas(key)) if e.first_token_ns is not None]
    assert firsts in ([], [0])
