"""Launches a batch, and where that breaks finds the rows to blame, so that their neighbours go on. Decides no plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from mini_infer.engines.batch import Batch, Choice, Row
from mini_infer.engines.devices import is_out_of_memory
from mini_infer.engines.errors import EngineFailed, MiniInferError, OutOfMemory, one_line
from mini_infer.engines.runner import Launched, Runner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that breaks a step even alone, and why."""

    row: Row
    error: MiniInferError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One planned step under way: in one part, or in several where the whole could not be run."""

    batch: Batch
    parts: tuple[Launched | Failure, ...]  # in the order of the rows

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The rows that could not be run."""
        return tuple(part for part in self.parts if isinstance(part, Failure))

    def wait(self) -> list[Choice]:
        """One choice for each sampling row of the batch, in order; a row that could not be run has one with an error.

        Blocking; raises what the device raised.
        """
        return [choice for part in self.parts for choice in _choices(part)]


def launch(runner: Runner, batch: Batch) -> Launch:
    """Starts a step. A batch that breaks is split in halves until what breaks is single rows.

    A broken launch changes nothing that counts: each row's keys and values are written again, to the same place.
    After one that was not for want of memory the device is tried out, and what that raises is passed on: then the
    engine is to blame, not a row.
    """
    return Launch(batch=batch, parts=tuple(_parts(runner, batch)))


def _parts(runner: Runner, batch: Batch) -> list[Launched | Failure]:
    outcome = _try(runner, batch)
    if isinstance(outcome, Launched):
        return [outcome]
    if not isinstance(outcome, OutOfMemory):
        runner.try_out()
    if len(batch.rows) == 1:
        return [Failure(batch.rows[0], outcome)]
    middle = len(batch.rows) // 2
    halves = (batch.rows[:middle], batch.rows[middle:])
    return [part for rows in halves for part in _parts(runner, replace(batch, rows=rows))]


def _choices(part: Launched | Failure) -> list[Choice]:
    if isinstance(part, Launched):
        return part.wait()
    return [Choice(0, error=part.error.message)] if part.row.samples else []


def _try(runner: Runner, batch: Batch) -> Launched | MiniInferError:
    """What `Runner.launch` raised is gone on return, and with it the frames that held its tensors."""
    try:
        return runner.launch(batch)
    except Exception as error:  # noqa: BLE001  # a model's code raises anything; it is logged and passed on
        if is_out_of_memory(error):
            return OutOfMemory(f"the device has no memory left for this stream: {one_line(error, named=True)}")
        _log.exception("a step of %d streams broke", len(batch.rows))
        return EngineFailed(f"a step broke: {one_line(error, named=True)}")
