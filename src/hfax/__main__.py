"""`python -m hfax`, the same as the `hfax` command."""

from hfax.cli.app import main

main()
