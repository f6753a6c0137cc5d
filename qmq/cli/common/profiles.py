"""Profiles: brokers by name, in ``~/.config/qmq.toml`` or below ``XDG_CONFIG_HOME``.

[default]
server = "qmq://127.0.0.1:20881"

[prod]
server = "qmqs://broker-a:20881,broker-b:20881"
tls_ca = "/etc/qmq/ca.pem"
timeout = "30s"
token_file = "/run/secrets/qmq"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from click.core import ParameterSource

from qmq.errors import InvalidOption

#: The options that a profile may give.
KEYS: Final = ("server", "timeout", "token", "token_file", "tls_ca", "tls_cert", "tls_key")
#: The profile that counts where none is named.
DEFAULT: Final = "default"

_META: Final = "qmq.profile"


class Profile(NamedTuple):
    """The values of a profile. *named*: by an option, which wins over environment variables."""

    values: Mapping[str, Any]
    named: bool


def config_file() -> Path:
    """Return the path of the file with the profiles."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base if base and os.path.isabs(base) else Path.home() / ".config") / "qmq.toml"


def read_profiles() -> dict[str, dict[str, Any]]:
    """Return the profiles by name; none if there is no file. Raises InvalidOption."""
    import tomllib

    path = config_file()
    try:
        profiles = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidOption(f"the profiles in {path} cannot be read: {error.strerror}; make it readable") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(f'{path} is not TOML: {error}; write [prod] and server = "qmq://..." below it') from None
    for name, values in profiles.items():
        if not isinstance(values, dict):
            raise InvalidOption(f"{name!r} in {path} belongs to no profile; write [{DEFAULT}] above it")
        for key, value in values.items():
            if key not in KEYS:
                near = get_close_matches(key, KEYS, n=1)
                advice = f"did you mean {near[0]}?" if near else f"a profile has {', '.join(KEYS)}"
                raise InvalidOption(f"profile {name!r} in {path} has a key {key!r:.80}; {advice}")
            if not isinstance(value, str | int | float if key == "timeout" else str) or isinstance(value, bool):
                shown = "..." if key == "token" else f"{value!r:.80}"
                raise InvalidOption(f"{key} = {shown} of profile {name!r} in {path} is not a text")
    return profiles


def take_profile(context: click.Context, parameter: click.Parameter, name: str | None) -> None:
    """Take the profile of --profile for this command. Raises InvalidOption if there is none of this name."""
    named = context.get_parameter_source("profile") is ParameterSource.COMMANDLINE
    if name is None or (not named and _META in context.meta):
        return  # or one was named before the name of the command
    profiles = read_profiles()
    if name not in profiles:
        near = get_close_matches(name, profiles, n=1)
        known = ", ".join(profiles) or "none"
        advice = f"did you mean {near[0]!r}?" if near else f"there are: {known}"
        raise InvalidOption(f"there is no profile {name!r:.80} in {config_file()}; {advice}")
    context.meta[_META] = Profile(profiles[name], named)


def profile_of(context: click.Context) -> Profile:
    """Return the profile that a command uses."""
    if _META not in context.meta:
        context.meta[_META] = Profile(read_profiles().get(DEFAULT, {}), named=False)
    profile: Profile = context.meta[_META]
    return profile


def complete_profiles(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the profiles that begin with *incomplete*."""
    try:
        return [name for name in read_profiles() if name.startswith(incomplete)]
    except InvalidOption:
        return []
