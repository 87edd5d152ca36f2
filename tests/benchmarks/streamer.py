"""What one token costs in `TokenStreamer`, beside transformers' own streamer: ``python tests/benchmarks/streamer.py``.

Text without a newline, which is where the stock streamer's cost grows with the square of the length. Figures are µs per
token of this thread's CPU time, which neighbours on the machine disturb least, the best of some runs; the last column
is the cost at the longer length over that at the shorter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase, TextIteratorStreamer

from mini_infer.engines.api import (
    FinishReason,
    OutputOptions,
    PreparedRequest,
    Sampling,
    StopConditions,
    TokenLogprob,
)
from mini_infer.engines.streamer import TokenStreamer

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import tokenizers as zoo  # tests/ is no package

PROSE = "The quick brown fox, said to jump over the lazy dog, isn't here; 大語言模型逐字輸出 naïve café, Grüße. "
STOPS = ("\nUser:", "<|im_end|>", "the lazy cat", "###")
Feed = Callable[[Sequence[int]], None]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--lengths", type=int, nargs=2, default=(256, 4096), metavar=("SHORT", "LONG"))
    arguments.add_argument("--repeat", type=int, default=7, help="runs, of which the best counts")
    options = arguments.parse_args()
    short, long = options.lengths
    torch.set_num_threads(1)
    _say("", f"{short}", f"{long}", "ratio")
    for build in (zoo.byte_level_bpe, zoo.sentencepiece_like, zoo.word_level, zoo.slow_byte_level):
        tokenizer = build()
        prose = PROSE * (long // 10)
        ids = list(tokenizer(prose, add_special_tokens=False).input_ids)[:long]
        for label, make in _variants(tokenizer).items():
            repeat = 1 if label == "stock put" else options.repeat
            costs = [min(_cost_us(make, ids[:length]) for _ in range(repeat)) for length in (short, long)]
            _say(f"{build.__name__}: {label}", *(f"{cost:.2f}" for cost in (*costs, costs[1] / costs[0])))


def _say(label: str, *figures: str) -> None:
    sys.stdout.write(f"{label:<56}" + "".join(f"{figure:>10}" for figure in figures) + "\n")


def _variants(tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[[], Feed]]:
    def push(streamer: TokenStreamer) -> Feed:
        def feed(ids: Sequence[int]) -> None:
            for token_id in ids:
                streamer.push(token_id)

        return feed

    def push_logprobs(streamer: TokenStreamer) -> Feed:
        entry = TokenLogprob(0, b"x", -1.0)

        def feed(ids: Sequence[int]) -> None:
            for token_id in ids:
                streamer.push(token_id, entry)

        return feed

    def put(streamer: TextIteratorStreamer) -> Feed:
        def feed(ids: Sequence[int]) -> None:
            streamer.put(torch.zeros(1, 4, dtype=torch.int64))
            for token in tensors(ids):
                streamer.put(token)

        return feed

    plain, stops = _request(()), _request(STOPS)
    every_token = _request(STOPS, logprobs=True)
    return {
        "stock put": lambda: put(TextIteratorStreamer(tokenizer, skip_prompt=True)),
        "put": lambda: put(TokenStreamer(tokenizer, skip_prompt=True)),
        "put, stop strings, sink": lambda: put(TokenStreamer(tokenizer, request=stops, sink=_Sink())),
        "push": lambda: push(TokenStreamer(tokenizer)),
        "push, stop strings": lambda: push(TokenStreamer(tokenizer, request=stops)),
        "push, sink": lambda: push(TokenStreamer(tokenizer, request=plain, sink=_Sink())),
        "push, stop strings, sink": lambda: push(TokenStreamer(tokenizer, request=stops, sink=_Sink())),
        "push, stop strings, sink, logprobs": lambda: push_logprobs(
            TokenStreamer(tokenizer, request=every_token, sink=_Sink())
        ),
    }


class _Sink:
    """Takes an event and forgets it."""

    def __call__(self, event: object) -> None:
        self.last = event


def tensors(ids: Sequence[int]) -> list[torch.Tensor]:
    """One tensor of shape [1] per id, as ``model.generate`` hands them over."""
    return list(torch.tensor(ids).split(1))


def _cost_us(make: Callable[[], Feed], ids: Sequence[int]) -> float:
    feed = make()
    start_ns = time.thread_time_ns()
    feed(ids)
    return (time.thread_time_ns() - start_ns) / len(ids) / 1e3


def _request(stop_strings: tuple[str, ...], *, logprobs: bool = False) -> PreparedRequest:
    return PreparedRequest(
        key="benchmark",
        prompt_ids=(0,),
        sampling=Sampling(),
        stop=StopConditions(max_new_tokens=1 << 20, strings=stop_strings),
        eos_token_ids=frozenset({1 << 20}),
        limit_reason=FinishReason.MAX_NEW_TOKENS,
        output=OutputOptions(logprobs=logprobs),
    )


if __name__ == "__main__":
    main()
