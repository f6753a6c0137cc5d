"""``qmq completion``: print what a shell needs to complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print what a shell needs to complete commands and names.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that makes SHELL complete commands and options, and the names of groups, subjects and profiles.

    Names come from the broker of --server, --profile or QMQ_SERVER; where none answers at once, none are offered.

    \b
    Examples:
      echo 'eval "$(qmq completion bash)"' >> ~/.bashrc
      echo 'eval "$(qmq completion zsh)"' >> ~/.zshrc
      qmq completion fish > ~/.config/fish/completions/qmq.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    root = context.find_root()
    click.echo(kind(root.command, {}, "qmq", "_QMQ_COMPLETE").source())
