"""The tests of connections and of the server once more, over TLS: no rule may differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import over_tls
from tests.net.server.test_connection import (
    test_a_client_that_does_not_read_is_not_read_from_and_others_continue,
    test_a_connection_that_is_reset_is_forgotten,
    test_a_hello_and_its_followers_may_arrive_in_one_piece_or_byte_by_byte,
    test_a_later_protocol_error_is_answered_and_ends_the_connection,
    test_a_silent_connection_is_closed_after_the_first_frame_timeout,
    test_another_version_is_refused,
    test_connections_over_the_limit_get_an_error_and_later_ones_are_admitted,
    test_invalid_bytes_are_answered_and_end_only_their_connection,
    test_large_frames_of_several_connections_arrive_whole,
)
from tests.net.server.test_server import (
    test_a_refusal_answers_the_request_and_the_connection_lives,
    test_a_stop_does_not_wait_for_clients_that_do_not_close,
    test_a_stop_sends_an_error_and_closes,
    test_a_welcome_has_the_limits_of_the_broker,
    test_an_unexpected_failure_ends_that_connection_only,
    test_answers_for_connections_that_are_gone_are_dropped,
    test_batches_that_arrive_together_are_one_turn_and_answered_in_order,
    test_each_request_gets_its_answer,
    test_more_than_the_buffer_holds_is_received_in_several_turns,
    test_nothing_is_logged_per_message,
    test_requests_without_an_answer_are_bounded,
    test_while_sends_wait_only_senders_are_not_read,
)

__all__ = [
    "test_a_client_that_does_not_read_is_not_read_from_and_others_continue",
    "test_a_connection_that_is_reset_is_forgotten",
    "test_a_hello_and_its_followers_may_arrive_in_one_piece_or_byte_by_byte",
    "test_a_later_protocol_error_is_answered_and_ends_the_connection",
    "test_a_refusal_answers_the_request_and_the_connection_lives",
    "test_a_silent_connection_is_closed_after_the_first_frame_timeout",
    "test_a_stop_does_not_wait_for_clients_that_do_not_close",
    "test_a_stop_sends_an_error_and_closes",
    "test_a_welcome_has_the_limits_of_the_broker",
    "test_an_unexpected_failure_ends_that_connection_only",
    "test_another_version_is_refused",
    "test_answers_for_connections_that_are_gone_are_dropped",
    "test_batches_that_arrive_together_are_one_turn_and_answered_in_order",
    "test_connections_over_the_limit_get_an_error_and_later_ones_are_admitted",
    "test_each_request_gets_its_answer",
    "test_invalid_bytes_are_answered_and_end_only_their_connection",
    "test_large_frames_of_several_connections_arrive_whole",
    "test_more_than_the_buffer_holds_is_received_in_several_turns",
    "test_nothing_is_logged_per_message",
    "test_requests_without_an_answer_are_bounded",
    "test_while_sends_wait_only_senders_are_not_read",
]


@pytest.fixture(autouse=True)
def by_tls(tmp_path: Path) -> Iterator[None]:
    """Serve, and connect, by TLS."""
    with over_tls(tmp_path / "tls"):
        yield
