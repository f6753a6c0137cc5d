"""Failed logins: the more of them come from one address, the later each is answered. No I/O; time is an argument.

A right token is let in at once, whatever else comes from its address. So this bounds the broker's work and the lines of
its log, while programs with an old token cannot keep their neighbours out; a secret of 256 bits needs no more.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

#: Failed logins of an address that are answered at once; one of them is forgotten in each EVERY_US.
AT_ONCE: Final = 5
EVERY_US: Final = 2_000_000
#: The first delay, which doubles with each further one, and the longest: clients wait 5 s for an answer to HELLO, and
#: one with a wrong token has to hear of it.
_FIRST_US: Final = 100_000
MOST_US: Final = 4_000_000
#: Addresses that are remembered.
MOST_ADDRESSES: Final = 10_000
#: The part of an IPv6 address that one client may choose at will; of IPv4 the address is whole.
_IPV6_NETWORK_BYTES: Final = 8


class _Failures(NamedTuple):
    weight: float
    at_us: int


class FailedLogins:
    """Counts failed logins by address."""

    def __init__(self) -> None:
        self._by_address: OrderedDict[bytes, _Failures] = OrderedDict()

    def failed(self, address: bytes, now_us: int) -> tuple[int, bool]:
        """Count a failed login from a packed IP address. Return after how many microseconds it is to be answered, and
        whether it is to be logged: one by one at first, later each time that their number has doubled.
        """
        key = address if len(address) == 4 else address[:_IPV6_NETWORK_BYTES]
        before = self._by_address.pop(key, _Failures(0, now_us))
        count = max(0.0, before.weight - (now_us - before.at_us) / EVERY_US) + 1
        self._by_address[key] = _Failures(count, now_us)
        if len(self._by_address) > MOST_ADDRESSES:
            self._by_address.popitem(last=False)
        number = int(count)
        if number <= AT_ONCE:
            return 0, True
        delay_us = min(_FIRST_US << min(number - AT_ONCE - 1, 16), MOST_US)
        return delay_us, number.bit_count() == 1
