"""The entry point of the command ``qmq``. It imports little, so that most of the start runs with SIGHUP blocked."""

from __future__ import annotations

from qmq.cli.common.signals import end_first_process, hold_hangups


def main() -> None:
    """Run the command. A SIGHUP that comes before the command is known waits: it ends all commands but a broker."""
    end_first_process()
    hold_hangups()
    from qmq.cli.main import cli

    cli()
