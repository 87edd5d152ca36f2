"""A step that breaks is split until the rows to blame stand alone, and their neighbours go on."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from mini_infer.engines.batch import Batch, Choice, Row
from mini_infer.engines.errors import EngineFailed, OutOfMemory
from mini_infer.engines.launching import Failure, Launch, launch
from mini_infer.engines.runner import Launched


class Ran(Launched):
    """Rows that ran; each chose its own number."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def wait(self) -> list[Choice]:
        return [Choice(int(row.key)) for row in self.rows if row.samples]


class Machine:
    """A runner that breaks where ``judge``, given the keys of the rows, names an error."""

    def __init__(self, judge: Callable[[Sequence[int]], BaseException | None]) -> None:
        self.judge = judge
        self.tried: list[Batch] = []
        self.num_try_outs = 0
        self.is_broken = False

    def launch(self, batch: Batch) -> Ran:
        self.tried.append(batch)
        error = self.judge([int(row.key) for row in batch.rows])
        if error is not None:
            raise error
        return Ran(batch.rows)

    def try_out(self) -> None:
        self.num_try_outs += 1
        if self.is_broken:
            raise RuntimeError("CUDA error: unspecified launch failure")


def batch_of(number: int, *, chunks: Sequence[int] = (), is_decode: bool = True) -> Batch:
    rows = [
        Row(key=f"{i}", slot=i, start=3, num_tokens=1, samples=i not in chunks, blocks=(i + 1,)) for i in range(number)
    ]
    return Batch(rows=tuple(rows), is_decode=is_decode)


def guilty_of(guilty: set[int], error: BaseException) -> Callable[[Sequence[int]], BaseException | None]:
    return lambda keys: error if guilty.intersection(keys) else None


def keys_of(launched: Launch) -> list[int]:
    """The rows of all parts, in order."""
    parts = [[part.row] if isinstance(part, Failure) else part.rows for part in launched.parts]
    return [int(row.key) for rows in parts for row in rows]


def test_a_step_that_runs_is_launched_once_and_whole():
    machine, batch = Machine(lambda keys: None), batch_of(5, chunks=[1])
    launched = launch(machine, batch)
    assert machine.tried == [batch]
    assert not launched.failures
    assert [choice.token_id for choice in launched.wait()] == [0, 2, 3, 4]
    assert machine.num_try_outs == 0


@pytest.mark.parametrize("number", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("seed", range(6))
def test_exactly_the_guilty_rows_fail_whoever_they_are(number, seed):
    rng = random.Random(seed * 100 + number)
    guilty = {key for key in range(number) if rng.random() < 0.3}
    chunks = [key for key in range(number) if rng.random() < 0.3]
    machine = Machine(guilty_of(guilty, RuntimeError("odd shape")))
    batch = batch_of(number, chunks=chunks)
    launched = launch(machine, batch)
    assert {int(failure.row.key) for failure in launched.failures} == guilty
    assert all(type(failure.error) is EngineFailed for failure in launched.failures)
    assert keys_of(launched) == list(range(number)), "every row once and in order"
    choices = launched.wait()
    assert len(choices) == len(batch.sampling_rows)
    for row, choice in zip(batch.sampling_rows, choices, strict=True):
        if int(row.key) in guilty:
            assert "odd shape" in choice.error
        else:
            assert choice == Choice(int(row.key))
    assert len(machine.tried) < 2 * number
    assert machine.num_try_outs == sum(not set(guilty).isdisjoint(int(r.key) for r in b.rows) for b in machine.tried)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_where_memory_is_short_smaller_steps_do_and_nothing_is_tried_out(error):
    machine = Machine(lambda keys: error if len(keys) > 4 else None)
    launched = launch(machine, batch_of(13))
    assert not launched.failures
    assert [choice.token_id for choice in launched.wait()] == list(range(13))
    assert machine.num_try_outs == 0, "a try-out needs memory too"
    machine = Machine(lambda keys: error if 3 in keys else None)
    [failure] = launch(machine, batch_of(6)).failures
    assert failure.row.key == "3"
    assert type(failure.error) is OutOfMemory
    assert failure.error.message.strip()[-1] != ":"


def test_the_parts_keep_what_the_step_is():
    first = batch_of(4, is_decode=False)
    machine = Machine(lambda keys: RuntimeError("x") if len(keys) > 1 else None)
    launch(machine, first)
    assert {part.admitted for part in machine.tried} == {first.admitted}
    assert {part.is_decode for part in machine.tried} == {False}
    assert [len(part.rows) for part in machine.tried] == [4, 2, 1, 1, 2, 1, 1]


def test_where_the_device_is_broken_no_row_is_blamed():
    machine = Machine(lambda keys: RuntimeError("CUDA error: unspecified launch failure"))
    machine.is_broken = True
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        launch(machine, batch_of(8))
    assert (len(machine.tried), machine.num_try_outs) == (1, 1), "it is found out at once"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_an_interrupt_is_nobodys_fault(error):
    machine = Machine(guilty_of({2}, error))
    with pytest.raises(type(error)):
        launch(machine, batch_of(4))
    assert len(machine.tried) == 1


def test_a_failure_holds_nothing_of_the_step(caplog):
    caplog.set_level("CRITICAL")  # pytest keeps records, and they the frames
    launched = launch(Machine(guilty_of({0}, ValueError("bad"))), batch_of(2))
    [failure] = launched.failures
    assert failure.error.__traceback__ is failure.error.__cause__ is failure.error.__context__ is None
    assert "ValueError: bad" in failure.error.message


def test_what_the_device_raises_later_is_passed_on():
    class Late(Ran):
        def wait(self):
            raise RuntimeError("CUDA error: device-side assert triggered")

    machine = Machine(lambda keys: None)
    machine.launch = lambda batch: Late(batch.rows)
    launched = launch(machine, batch_of(2))
    with pytest.raises(RuntimeError, match="device-side assert"):
        launched.wait()
