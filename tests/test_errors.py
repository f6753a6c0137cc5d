"""The error tree: one root, a code of its own for each error, and a word on whether trying again can help."""

from __future__ import annotations

import inspect
import pickle

import pytest

from qmq import errors
from qmq.errors import InvalidName, QmqError, SendFailed, SendFailure, SendUnknown

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, QmqError)]

#: Trying again can help with these, and with no other.
RETRYABLE = {
    "BrokersMissed",
    "BrokerStopping", "ConnectionLost", "Overloaded", "QueueFull", "StorageFailed", "StorageFull", "TooManyProducers",
}  # fmt: skip


def test_codes_are_words_that_name_one_error_each() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes) > 20
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)
    assert all("code" in vars(kind) for kind in KINDS), "an inherited code would name another error on the wire"


@pytest.mark.parametrize("kind", KINDS)
def test_each_has_its_text_and_says_whether_to_retry(kind: type[QmqError]) -> None:
    assert kind.__doc__
    assert kind.retryable == (kind.__name__ in RETRYABLE)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_survive_and_travel_between_processes(kind: type[QmqError]) -> None:
    error = pickle.loads(pickle.dumps(kind("the disk is full; make room")))
    assert type(error) is kind
    assert str(error) == "the disk is full; make room"


def test_an_error_of_a_newer_broker_keeps_its_word_on_trying_again() -> None:
    for retryable in (True, False):
        error = pickle.loads(pickle.dumps(errors.RemoteError("from_the_future: too new", retryable)))
        assert error.retryable is retryable
        assert str(error) == "from_the_future: too new"


def test_wrong_arguments_are_value_errors_too() -> None:
    for kind in (errors.InvalidName, errors.InvalidOption, errors.MessageTooLarge):
        assert issubclass(kind, ValueError)
    with pytest.raises(ValueError, match="no"):
        raise InvalidName("no")


def test_failures_are_listed() -> None:
    cause = errors.StorageFull("the disk is full")
    failure = SendFailure(4, "hotel.order", "k", cause, "refused")
    error = SendFailed("1 message was not acknowledged", [failure])
    assert error.failures == [failure]
    assert repr(failure) == f"SendFailure(4, 'hotel.order', 'k', {cause!r}, 'refused')"
    assert SendUnknown("nobody knows").failures == []
    assert issubclass(SendUnknown, SendFailed)
