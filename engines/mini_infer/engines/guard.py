"""Takes a model for the packed forward, or refuses it: only where the packed forward gives the model's own numbers.

Structure is checked first, for what a short text cannot show; then a probe proves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mini_infer.engines.attention import ATTENTION_NAME, AttentionSwitch, unbind_layers
from mini_infer.engines.attention_step import AttentionStep, Span
from mini_infer.engines.errors import NotExact, one_line
from mini_infer.engines.kv_cache import KVCache
from mini_infer.engines.stage import Stage, StepInputs
from mini_infer.engines.survey import LayerWish, survey

_ROPE_TYPES = {"default", "linear", "llama3", "proportional", "yarn"}
"""Those whose angles depend on a token's position alone, and not on the length of the text around it."""

_BLOCK_SIZE = 8
_MAX_PROBED_WINDOW = 128  # a longer one would make the probe dear; its mask has been surveyed, its mathematics is ours
_ALLOWED = 1e-4
_ALLOWED_ROUNDINGS = 40
"""How far logits may be off, root mean square, as a part of their own spread; or in roundings of a coarser type, of
which small models in bfloat16 were seen to need 18."""

_Row = tuple[int, int, int]  # which prompt; the positions that a step feeds: from, to


def pack(model: PreTrainedModel) -> Stage:
    """The model as a stage without a cache: from here on it answers through `Stage.run` alone.

    Costs a few forwards of few tokens.

    Raises:
        NotExact: Packed it would not give its own answers; why, in one line. The model is as it was.
    """
    switch = AttentionSwitch(model)
    try:
        with torch.inference_mode():
            _check_rope(model)
            wishes = survey(model)
            prompts = _prompts(model, wishes)
            expected = [model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts]
            switch.turn_to(ATTENTION_NAME)
            stage = Stage(model, [wish.shape for wish in wishes])
            _prove(stage, prompts, expected)
            unbind_layers(model)
            return stage
    except NotExact as error:
        reason = error.message
    except Exception as error:  # noqa: BLE001  # a model's own code raises anything
        reason = f"its packed forward fails: {one_line(error)}"
    unbind_layers(model)
    switch.turn_back()
    raise NotExact(f"{type(model).__name__} cannot be packed: {reason}")


def _check_rope(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    declared = [getattr(config, "rope_parameters", None) or {}]
    declared += [part for part in declared[0].values() if isinstance(part, dict)]  # one for each kind of layer
    types = {part["rope_type"] for part in declared if "rope_type" in part}
    for module in model.modules():
        used = getattr(module, "rope_type", None)
        types |= set(used.values()) if isinstance(used, dict) else {used} - {None}
    if unknown := sorted(types - _ROPE_TYPES):
        raise NotExact(f"its rotary positions ({', '.join(unknown)}) may depend on the length of the whole text")


def _prompts(model: PreTrainedModel, wishes: Sequence[LayerWish]) -> list[torch.Tensor]:
    # The first is long enough to leave the shortest window behind, both in its first chunk and in a later one.
    config = model.config.get_text_config()
    longest = min(_MAX_PROBED_WINDOW, getattr(config, "max_position_embeddings", _MAX_PROBED_WINDOW) - 22)
    windows = [wish.window for wish in wishes if wish.window is not None and wish.window <= longest]
    lengths = (min(windows, default=8) + 22, 19, 3)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(config.vocab_size, (length,), generator=generator).to(model.device) for length in lengths]


def _prove(stage: Stage, prompts: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Runs the prompts, packed: in chunks of several sizes, beside each other, then token by token."""
    probe = _Probe(stage, prompts, expected)
    long, middle, short = (len(prompt) for prompt in prompts)
    probe.check([(0, 0, long - 12), (1, 0, 7)])
    probe.check([(1, 7, middle - 2), (0, long - 12, long - 2), (2, 0, short - 2)])
    probe.check([(0, long - 2, long - 1), (1, middle - 2, middle - 1), (2, short - 2, short - 1)])
    probe.check([(2, short - 1, short), (0, long - 1, long)])


class _Probe:
    def __init__(self, stage: Stage, prompts: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        self._stage = stage
        self._prompts = prompts
        self._expected = expected
        # Every other block, backwards; but those of the last two prompts one after the other.
        width = -(-len(prompts[0]) // _BLOCK_SIZE)
        scattered = list(range(2 * width + 6, 6, -2))
        self._blocks = [scattered, [1, 2, 3], [4]]
        stage.bind(KVCache(stage.shapes, 2 * width + 7, _BLOCK_SIZE, stage.dtype, stage.device))

    def check(self, rows: Sequence[_Row]) -> None:
        logits = self._stage.run(self._inputs(rows), None)  # [num_rows, vocab_size]
        expected = torch.stack([self._expected[prompt][end - 1] for prompt, _, end in rows])
        if logits.shape != expected.shape:
            raise NotExact("it does not give the logits of chosen tokens alone")
        off = (logits.double() - expected.double()).square().mean(-1).sqrt()  # [num_rows]
        parts = off / expected.double().std(-1).clamp(min=1e-9)
        allowed = max(_ALLOWED, _ALLOWED_ROUNDINGS * torch.finfo(self._stage.dtype).eps)
        if not bool((parts <= allowed).all()):  # what is no number is no number below
            raise NotExact(f"its logits are off by {parts.max().item():.2g} of their spread")

    def _inputs(self, rows: Sequence[_Row]) -> StepInputs:
        device = self._stage.device
        spans: list[Span] = []
        for prompt, start, end in rows:
            begin = spans[-1].end if spans else 0
            spans.append(Span(begin, begin + end - start, start, self._blocks[prompt]))
        places = [(span.blocks, position) for span in spans for position in range(span.start, span.length)]
        width = max(len(span.blocks) for span in spans)
        attention = AttentionStep(
            cache_index=torch.tensor(
                [blocks[at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE for blocks, at in places], device=device
            ),
            spans=spans,
            block_table=torch.tensor([[*span.blocks, *[0] * (width - len(span.blocks))] for span in spans]).to(device),
            lengths=torch.tensor([span.length for span in spans], device=device),
            is_decode=all(span.num_tokens == 1 for span in spans),
        )
        return StepInputs(
            token_ids=torch.cat([self._prompts[prompt][start:end] for prompt, start, end in rows]),
            positions=torch.tensor([position for _, position in places], device=device),
            sample_index=torch.tensor([span.end - 1 for span in spans], device=device),
            attention=attention,
        )
