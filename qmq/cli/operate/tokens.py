"""``qmq tokens``: create, list, rotate and revoke the tokens that let clients in, in the file of a broker."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from qmq.cli.common.arguments import Seconds, inherited
from qmq.cli.common.command_group import CommandGroup
from qmq.cli.common.confirm import confirm, yes_option
from qmq.cli.common.formatting import age_of, iso, number
from qmq.cli.common.listing import Fields, output_options, print_object, show
from qmq.errors import InvalidOption
from qmq.names import check_prefix, check_token
from qmq.tokens import (
    MOST_SECRETS,
    TOKENS_NAME,
    USED_NAME,
    TokenEntry,
    Tokens,
    change_tokens,
    hash_of,
    new_secret,
    read_tokens,
    read_used,
)

if TYPE_CHECKING:
    from rich.table import Table


class ListedToken(NamedTuple):
    """A token with its name, and when it was last used; None where that is not known."""

    name: str
    entry: TokenEntry
    last_used: datetime | None


FIELDS: Final[Fields[ListedToken]] = {
    "name": lambda one: one.name,
    "produce": lambda one: list(one.entry.produce),
    "consume": lambda one: list(one.entry.consume),
    "group": lambda one: list(one.entry.group),
    "browse": lambda one: list(one.entry.browse),
    "admin": lambda one: one.entry.admin,
    "secrets": lambda one: len(one.entry.secrets),
    "created_at": lambda one: one.entry.created,
    "expires_at": lambda one: one.entry.expires,
    "last_used_at": lambda one: one.last_used,
}


def _file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options --data-dir and --tokens-file."""
    data_dir = click.option(
        "--data-dir",
        metavar="DIR",
        envvar="QMQ_DATA_DIR",
        type=click.Path(path_type=Path),
        default="qmq-data",
        show_default="./qmq-data",
        callback=inherited,
        help="The data directory of the broker. Also from QMQ_DATA_DIR.",
    )
    tokens_file = click.option(
        "--tokens-file",
        metavar="FILE",
        envvar="QMQ_TOKENS_FILE",
        type=click.Path(path_type=Path),
        callback=inherited,
        help=f"The file of the broker's setting tokens_file.  [default: {TOKENS_NAME} in --data-dir]",
    )
    return data_dir(tokens_file(command))


@click.group(cls=CommandGroup, lists="without arguments", short_help="Say who may come in, and do what.")
@output_options
@_file_options
def tokens(as_json: bool, header: bool, data_dir: Path, tokens_file: Path | None) -> None:
    """Create, list, rotate and revoke tokens: who may come in at a broker, and do what.

    They work on the file of the broker on this machine, which takes changes within a second, running or not. As soon as
    the file has a token, every client needs one.

    \b
    Examples:
      qmq tokens create ops --admin
      qmq tokens create shop-api --produce shop.order. --expires 90d
      qmq tokens create billing --consume shop.order. --group billing
      qmq tokens rotate billing            a second secret; the first still works
      qmq tokens rotate billing --finish   the first one works no more
    """


@tokens.command(short_help="Create a token and show its secret, once.")
@click.argument("name")
@click.option("--produce", metavar="PREFIX", multiple=True, help="May send to subjects of PREFIX; may be repeated.")
@click.option("--consume", metavar="PREFIX", multiple=True, help="May receive messages of PREFIX; may be repeated.")
@click.option("--group", metavar="PREFIX", multiple=True, help="May take part in groups of PREFIX; may be repeated.")
@click.option("--browse", metavar="PREFIX", multiple=True, help="May find, get and trace messages of PREFIX.")
@click.option("--admin", is_flag=True, help="May do everything.")
@click.option("--expires", metavar="TIME", type=Seconds(above_0=True), help="Expires after so long: 90d.")
@click.option("--certificate", is_flag=True, help="Make no secret: a client certificate of this name stands for it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_file_options
def create(
    name: str,
    produce: tuple[str, ...],
    consume: tuple[str, ...],
    group: tuple[str, ...],
    browse: tuple[str, ...],
    admin: bool,
    expires: float | None,
    certificate: bool,
    as_json: bool,
    data_dir: Path,
    tokens_file: Path | None,
) -> None:
    """Create the token NAME and print it, NAME:SECRET, on stdout. The secret is shown this once: the file keeps a hash.

    A PREFIX that ends with a dot takes all names that begin so, "" takes all, and any other only this name. A consumer
    of a group needs the right to its subjects and the right to the group.

    \b
    Examples:
      qmq tokens create shop-api --produce shop.order. --expires 90d > shop.token
      qmq tokens create billing --consume shop.order. --group billing
    """
    check_token(name)
    for prefix in (*produce, *consume, *group, *browse):
        check_prefix(prefix)
    if not (produce or consume or group or browse or admin):
        raise InvalidOption("a token without any right lets nobody do anything; give --produce, --consume or others")
    now = datetime.now(UTC).replace(microsecond=0)
    secret = "" if certificate else new_secret()
    entry = TokenEntry(
        produce=produce, consume=consume, group=group, browse=browse, admin=admin, created=now,
        expires=None if expires is None else _after(now, expires),
        secrets=(hash_of(secret),) if secret else (),
    )  # fmt: skip

    def change(known: Tokens) -> Tokens:
        if name in known:
            raise InvalidOption(f"there is a token {name!r} already; revoke it first, or rotate its secret")
        return known | {name: entry}

    path = _path(data_dir, tokens_file)
    after = change_tokens(path, change)
    _show_secret(name, secret, path, as_json)
    if len(after) == 1:
        click.echo("qmq: from now on every client of this broker needs a token", err=True)
    if not any(one.admin for one in after.values()):
        click.echo("qmq: no token has --admin, so nobody may change groups or see all of the broker", err=True)


@tokens.command("list", short_help="List the tokens with their rights.")
@output_options
@_file_options
def list_tokens(as_json: bool, header: bool, data_dir: Path, tokens_file: Path | None) -> None:
    """List the tokens: their rights, when they expire, and when each was last used (the broker notes it each minute).

    \b
    Examples:
      qmq tokens list
      qmq tokens --json | jq 'select(.last_used_at == null)'
    """
    path = _path(data_dir, tokens_file)
    known = _tokens_of(path)
    used = read_used(data_dir / USED_NAME)
    rows = [ListedToken(name, entry, _time(used.get(name))) for name, entry in sorted(known.items())]
    none = f"no tokens in {path}: every client may do everything"
    caption = number(len(rows), "token")
    show(rows, FIELDS, _table, as_json=as_json, header=header, none=none, caption=caption)


@tokens.command(short_help="Revoke a token: its connections end within a second.")
@click.argument("name")
@yes_option
@_file_options
def revoke(name: str, yes: bool, data_dir: Path, tokens_file: Path | None) -> None:
    """Remove the token NAME. The broker ends its connections within a second, and others get what they have in flight.

    On a terminal it asks first; elsewhere it needs --yes. The last token with --admin is not revoked: create another
    one before, or rotate its secret with --now.

    \b
    Examples:
      qmq tokens revoke shop-api
      qmq tokens revoke shop-api --yes
    """

    def change(known: Tokens) -> Tokens:
        entry = _known(known, name)
        left = {other: one for other, one in known.items() if other != name}
        if entry.admin and not any(one.admin for one in left.values()):
            raise InvalidOption(
                f"{name!r} is the last token with --admin: create another one before, or end its secret with "
                f"`qmq tokens rotate {name} --now`"
            )
        return left

    path = _path(data_dir, tokens_file)
    change(_tokens_of(path))  # what cannot be is refused before anybody is asked
    does = f"revoke token {name}, which ends its connections"
    confirm(yes, f"this will {does}", lambda: f"{does}? {_last_use(name, data_dir)}")
    change_tokens(path, change)
    click.echo(f"revoked {name} in {path}")


@tokens.command(short_help="Give a token another secret.")
@click.argument("name")
@click.option("--finish", is_flag=True, help="End the old secret: every program has the new one.")
@click.option("--now", is_flag=True, help="End all secrets at once, as they have become known.")
@click.option("--expires", metavar="TIME", type=Seconds(above_0=True), help="Let it expire so long from now.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_file_options
def rotate(
    name: str,
    finish: bool,
    now: bool,
    expires: float | None,
    as_json: bool,
    data_dir: Path,
    tokens_file: Path | None,
) -> None:
    """Give the token NAME a second secret and print it. Both work until --finish ends the old one; connections that
    were made with the new one stay, with what they have in flight.

    \b
    Example:
      qmq tokens rotate billing > billing.token
      qmq tokens rotate billing --finish
    """
    if finish and now:
        raise InvalidOption("give either --finish or --now")
    secret = "" if finish else new_secret()

    def change(known: Tokens) -> Tokens:
        entry = _known(known, name)
        if finish and len(entry.secrets) < MOST_SECRETS:
            raise InvalidOption(f"token {name!r} has no second secret: `qmq tokens rotate {name}` makes one")
        if not finish and not now and len(entry.secrets) == MOST_SECRETS:
            raise InvalidOption(f"token {name!r} has two secrets: end the older with --finish, or both with --now")
        kept = entry.secrets[1:] if finish else () if now else entry.secrets
        secrets = (*kept, hash_of(secret)) if secret else kept
        changed: dict[str, Any] = {"secrets": secrets}
        if expires is not None:
            changed["expires"] = _after(datetime.now(UTC).replace(microsecond=0), expires)
        return known | {name: entry.model_copy(update=changed)}

    path = _path(data_dir, tokens_file)
    change_tokens(path, change)
    if finish:
        click.echo(f"ended the old secret of {name} in {path}")
    else:
        _show_secret(name, secret, path, as_json)


def _known(known: Mapping[str, TokenEntry], name: str) -> TokenEntry:
    entry = known.get(name)
    if entry is None:
        raise InvalidOption(f"there is no token {name!r:.60}; there are: {', '.join(sorted(known)) or 'none'}")
    return entry


def _tokens_of(path: Path) -> Tokens:
    """Return the tokens of a file; none where there is no file. Raises InvalidOption if it cannot be read."""
    try:
        return read_tokens(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidOption(f"the tokens in {path} cannot be read: {error.strerror}") from None


def _last_use(name: str, data_dir: Path) -> str:
    """Return a sentence that says when a token was last used."""
    used = _time(read_used(data_dir / USED_NAME).get(name))
    return "It is not known to have been used." if used is None else f"It was last used {age_of(used)} ago."


def _path(data_dir: Path, tokens_file: Path | None) -> Path:
    return data_dir / TOKENS_NAME if tokens_file is None else tokens_file


def _after(now: datetime, seconds: float) -> datetime:
    try:
        return now + timedelta(seconds=seconds)
    except OverflowError:
        raise InvalidOption("--expires is too far ahead; leave it out for never") from None


def _time(used_us: int | None) -> datetime | None:
    return None if used_us is None else datetime.fromtimestamp(used_us / 1e6, UTC)


def _show_secret(name: str, secret: str, path: Path, as_json: bool) -> None:
    """Print a new token: on stdout nothing but the token, so that it can go into a file."""
    if as_json:
        print_object({"name": name, "token": f"{name}:{secret}" if secret else None, "file": str(path)})
        if secret:
            _warn_of_readers()
        return
    if not secret:
        click.echo(f"created {name} in {path}: a client certificate of this name stands for it", err=True)
        return
    click.echo(f"{name}:{secret}")
    click.echo(f"qmq: {path} has its hash; the token is shown this once: keep it as QMQ_TOKEN, or in a file", err=True)
    _warn_of_readers()


def _warn_of_readers() -> None:
    """Warn if stdout is a file that other users of this machine can read."""
    try:
        mode = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):  # no descriptor
        return
    if stat.S_ISREG(mode) and mode & 0o077:
        click.echo("qmq: other users can read this file: chmod 600 it; `umask 077` before makes such files", err=True)


def _table(rows: Sequence[ListedToken], width: int) -> Table:
    from rich.markup import escape

    from qmq.cli.common.tables import alarming, table_of

    now = datetime.now(UTC)
    table = table_of("token")
    for column in ("may", "secrets", "expires", "last used"):
        table.add_column(column)
    for name, entry, used in rows:
        ends = "never" if entry.expires is None else f"{iso(entry.expires)}"[:10]
        is_over = entry.expires is not None and entry.expires <= now
        table.add_row(
            escape(name),
            escape(_may(entry)),
            str(len(entry.secrets)) if entry.secrets else "certificate",
            alarming(ends, is_over),
            "-" if used is None else f"{age_of(used)} ago",
        )
    return table


def _may(entry: TokenEntry) -> str:
    """Return the rights of a token in words."""
    if entry.admin:
        return "everything (admin)"
    kinds = ("produce", "consume", "group", "browse")
    found = [(kind, getattr(entry, kind)) for kind in kinds]
    return "; ".join(f"{kind} {', '.join(one or 'all' for one in prefixes)}" for kind, prefixes in found if prefixes)
