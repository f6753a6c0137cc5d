"""``qmq cancel``: cancel a delayed message."""

from __future__ import annotations

import click

from qmq import connect
from qmq.cli.common.connect import admin_options, run
from qmq.cli.common.errors import EXIT_FAILED
from qmq.format.ids import MessageId


@click.command(short_help="Cancel a delayed message.")
@click.argument("message_id", metavar="ID")
@admin_options
@click.pass_context
def cancel(context: click.Context, message_id: str, server: str, timeout: float) -> None:
    """Cancel the delayed message with this ID, which the receipt of the send has: it will never be delivered.

    Ends with 1 if the message has been delivered, or if the broker has no such delayed message.

    \b
    Example:
      id=$(qmq produce shop.reminder hello --delay 2h --ids) && qmq cancel $id
    """
    MessageId.parse(message_id)

    async def change() -> bool:
        async with connect(server, admin_timeout=timeout) as client:
            return await client.cancel(message_id)

    if run(change()):
        click.echo("cancelled")
        return
    click.echo("qmq: not cancelled: it has been delivered, or the broker has no delayed message of that id", err=True)
    context.exit(EXIT_FAILED)
