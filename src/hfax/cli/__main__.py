"""`python -m hfax.cli`, equivalent to the `hfax` command."""

from hfax.cli.app import main

main()
