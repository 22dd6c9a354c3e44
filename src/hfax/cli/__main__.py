"""`python -m hfax.cli`, the same as the `hfax` command."""

from hfax.cli.app import main

main()
