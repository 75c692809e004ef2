"""`wavealign report`: one page to show a colleague."""

import click


@click.command()
def report() -> None:
    """X."""
