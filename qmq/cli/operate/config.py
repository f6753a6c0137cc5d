"""``qmq config``: show every setting of serve."""

from __future__ import annotations

import json
import sys

import click

from qmq.settings import SettingDescription, describe, show_bytes


@click.command(short_help="Show every setting of serve, its default and what it does.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def config(as_json: bool) -> None:
    """Show every setting of `qmq serve`, its default and what it does.

    On a terminal this is a table. In a pipe it is a settings file with every default: `qmq config > qmq.toml` makes one
    to edit for `qmq serve --config qmq.toml`.

    \b
    Examples:
      qmq config
      qmq config --json | jq 'select(.key == "retention_ms")'
    """
    settings = describe()
    if as_json:
        for setting in settings:
            click.echo(json.dumps(setting._asdict()))
    elif sys.stdout.isatty():
        _print_table(settings)
    else:
        click.echo("\n".join(_toml_lines(settings)), nl=False)


def _toml_lines(settings: list[SettingDescription]) -> list[str]:
    lines = ["# Settings for `qmq serve --config FILE`; each line shows the default.\n"]
    for setting in settings:
        lines += [f"# {setting.description}", f"# Allowed: {setting.allowed}."]
        # The numbers, strings and lists of strings of JSON are valid TOML.
        value = json.dumps("" if setting.default is None else setting.default)
        lines.append(f"{'# ' if setting.default is None else ''}{setting.key} = {value}\n")
    return lines


def _print_table(settings: list[SettingDescription]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from qmq.cli.common.tables import WIDE, print_table, table_of

    console = Console()
    is_wide = console.width >= WIDE
    table = table_of("setting" if is_wide else "setting\n  default")
    table.columns[0].no_wrap = True
    if is_wide:
        table.add_column("default", justify="right", no_wrap=True)
    table.add_column("what it does" if is_wide else "what it does\nallowed", overflow="fold")
    if is_wide:
        table.add_column("allowed", overflow="fold")
    for setting in settings:
        name, default = f"[bold]{setting.key}[/]", escape(_shown_default(setting))
        does, allowed = escape(setting.description), f"[dim]{escape(_shown_range(setting))}[/]"
        table.add_row(*([name, default, does, allowed] if is_wide else [f"{name}\n  {default}", f"{does}\n{allowed}"]))
    print_table(table, console)
    click.echo("Change one with --set key=value, or several with --config FILE.toml.")


def _shown_default(setting: SettingDescription) -> str:
    if isinstance(setting.default, int):
        return show_bytes(setting.default) if setting.unit == "bytes" else f"{setting.default:,}"
    if isinstance(setting.default, list):
        return ", ".join(setting.default) or "-"
    return setting.default or "-"


def _shown_range(setting: SettingDescription) -> str:
    if setting.minimum is None or setting.maximum is None:
        return setting.allowed
    show = show_bytes if setting.unit == "bytes" else "{:,}".format
    return f"{show(setting.minimum)} to {show(setting.maximum)}"
