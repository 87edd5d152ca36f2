"""Steps of packed rows, made from plain numbers."""

from collections.abc import Sequence

import torch

from mini_infer.engines.attention_step import AttentionStep, Span

Row = tuple[int, int, Sequence[int]]  # first position, number of tokens, blocks


def attention_step(rows: Sequence[Row], block_size: int) -> AttentionStep:
    spans: list[Span] = []
    for start, num_tokens, blocks in rows:
        begin = spans[-1].end if spans else 0
        spans.append(Span(begin, begin + num_tokens, start, blocks))
    width = max(len(blocks) for _, _, blocks in rows)
    return AttentionStep(
        cache_index=torch.tensor(
            [
                span.blocks[position // block_size] * block_size + position % block_size
                for span in spans
                for position in range(span.start, span.length)
            ]
        ),
        spans=spans,
        block_table=torch.tensor([[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in rows]),
        lengths=torch.tensor([span.length for span in spans]),
        is_decode=all(num_tokens == 1 for _, num_tokens, _ in rows),
    )


def deal_blocks(lengths: Sequence[int], block_size: int, *, scattered: bool) -> list[list[int]]:
    """Blocks for rows of these lengths, from 1 on: dealt out in turn and backwards, or each row's in one piece."""
    counts = [-(-length // block_size) for length in lengths]
    dealt: list[list[int]] = [[] for _ in counts]
    turns = (
        [row for turn in range(max(counts)) for row in range(len(counts)) if turn < counts[row]]
        if scattered
        else [row for row, count in enumerate(counts) for _ in range(count)]
    )
    for block, row in enumerate(turns, start=1):
        dealt[row].append(len(turns) + 1 - block if scattered else block)
    return dealt
