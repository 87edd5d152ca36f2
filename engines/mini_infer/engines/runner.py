"""From a batch to the tokens that it chooses: the only door to the device. Decides nothing and knows no thread.

A step is launched here and awaited later, so that on CUDA the next one can be launched before this one is handled.
All work goes to one stream in the order of the launches; so a block that was freed can be given away at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mini_infer.engines.api import FinishReason, OutputOptions, PreparedRequest, StopConditions
from mini_infer.engines.batch import Admitted, Batch, Choice, Row
from mini_infer.engines.errors import StreamFailed
from mini_infer.engines.kv_cache import KVCache
from mini_infer.engines.preparation import BUILT_IN_SAMPLING
from mini_infer.engines.sampling_table import Choices, SamplingTable
from mini_infer.engines.slot_tables import SlotTables
from mini_infer.engines.stage import Stage
from mini_infer.engines.step_packer import StepPacker

_TRY_OUT = PreparedRequest(
    key="",
    prompt_ids=(0,),
    sampling=BUILT_IN_SAMPLING,
    stop=StopConditions(max_new_tokens=2),
    eos_token_ids=frozenset(),
    limit_reason=FinishReason.MAX_NEW_TOKENS,
    output=OutputOptions(),
)


class Runner:
    """Runs batches on a list of stages, the last of which makes logits.

    Args:
        stages: in order; bound to ``cache``.
        cache: its block 0 belongs to nobody: padding and try-outs write there.
        max_running: slots that batches use, 0 to ``max_running - 1``.
        max_context: tokens of the longest sequence.
        max_step_tokens: tokens of the largest step.
        decode_buckets: sizes that a decode step is padded to; see `StepPacker`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        cache: KVCache,
        *,
        max_running: int,
        max_context: int,
        max_step_tokens: int,
        decode_buckets: Sequence[int] = (),
    ) -> None:
        device = stages[-1].device
        self._stages = stages
        self._block_size = cache.block_size
        self._spare_slot = max_running
        num_slots = max_running + 1
        self._tables = SlotTables(num_slots, max_context + 1, -(-max_context // cache.block_size), device)
        self._sampling = SamplingTable(num_slots, device)
        self._packer = StepPacker(
            self._tables,
            device,
            block_size=cache.block_size,
            spare_slot=self._spare_slot,
            max_step_tokens=max(max_step_tokens, num_slots, *decode_buckets),
            decode_buckets=decode_buckets,
        )

    def launch(self, batch: Batch) -> Launched:
        """Starts a step; on a CPU it is over when this returns.

        Raises what the model or the device raises. The step can then be launched again, whole or in parts.
        """
        for admitted in batch.admitted:
            self._tables.admit(admitted)
            self._sampling.set(admitted.slot, admitted.request)
        self._tables.note_blocks(batch.rows)
        step = self._packer.pack(batch)
        hidden: Tensor | None = None
        for stage in self._stages:
            hidden = stage.run(step.inputs, hidden)
        assert hidden is not None, "there is a stage"
        rows = [(row.slot, row.start + row.num_tokens) for row in batch.sampling_rows]
        if not rows:
            return Launched(None)
        choices = self._sampling.choose(hidden, rows, self._tables.tokens)
        self._tables.note_tokens(step.sample_slots, step.sample_positions, choices.token_ids)
        return Launched(choices)

    def try_out(self, num_tokens: int = 1) -> None:
        """One real prefill of ``num_tokens`` and one decode, awaited; they disturb no slot.

        Raises what they raise, and `StreamFailed` where they choose no token.
        """
        slot, blocks = self._spare_slot, (0,) * (num_tokens // self._block_size + 1)
        admitted = Admitted(slot=slot, request=_TRY_OUT, token_ids=(0,) * num_tokens)
        prefill = Row(key="", slot=slot, start=0, num_tokens=num_tokens, samples=True, blocks=blocks)
        decode = Row(key="", slot=slot, start=num_tokens, num_tokens=1, samples=True, blocks=blocks)
        for batch in (Batch(rows=(prefill,), admitted=(admitted,)), Batch(rows=(decode,), is_decode=True)):
            for choice in self.launch(batch).wait():
                if choice.error is not None:
                    raise StreamFailed(choice.error)


class Launched:
    """A step under way. Its results start on their way to the host at once, ahead of all that is launched later."""

    def __init__(self, choices: Choices | None) -> None:
        self._choices = None if choices is None else _on_its_way(choices)
        self._arrived: torch.cuda.Event | None = None
        if choices is not None and choices.token_ids.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[Choice]:
        """What each sampling row chose, in their order. Blocking; raises what the device raised."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [] if self._choices is None else self._choices.to_host()


def _on_its_way(choices: Choices) -> Choices:
    def to_host(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to("cpu", non_blocking=True)

    return replace(
        choices,
        token_ids=choices.token_ids.to("cpu", non_blocking=True),
        logprobs=to_host(choices.logprobs),
        top_ids=to_host(choices.top_ids),
        top_logprobs=to_host(choices.top_logprobs),
    )
