"""Another thread sees whether train() still runs, beside code of any kind."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType

from hfopt.monitor.session import TrainCall


class Trainer:
    def train(self, inner: Callable[[], object]) -> object:
        return inner()


def with_a_slice(code: CodeType) -> CodeType:
    """As torch.compile makes it: constants that cannot be hashed before Python 3.12."""
    return code.replace(co_consts=(*code.co_consts, slice(0, 1)))


def test_it_is_seen_while_train_runs_and_not_after() -> None:
    trainer = Trainer()
    call = trainer.train(lambda: TrainCall(trainer))
    assert isinstance(call, TrainCall)
    assert trainer.train(call.runs) is True
    assert call.runs() is False


def test_code_that_cannot_be_hashed_may_be_on_the_stack() -> None:
    trainer = Trainer()

    def compiled() -> tuple[bool, bool]:
        call = TrainCall(trainer)
        return call.runs(), bool(call._entries)

    compiled.__code__ = with_a_slice(compiled.__code__)
    assert trainer.train(compiled) == (True, True)
