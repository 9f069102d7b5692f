"""Entry of `kvscaler` and of `kubectl kvscaler`: the command tree and its exit codes.

Exit codes: 0 the answer is yes, 1 it is no (a budget does not fit), 2 the question is wrong.
"""

import click
import kvscaler

from kvscaler_cli.listing import list_names
from kvscaler_cli.plan import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvscaler.__version__, prog_name="kvscaler")
def main() -> None:
    """How many requests fit on this card, and what a service needs to hold its traffic."""


main.add_command(plan)
main.add_command(list_names)

if __name__ == "__main__":
    main()
