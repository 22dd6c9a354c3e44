"""`python -m hfax.matrix`: the same as `hfax matrix`."""

from hfax.matrix.command import main

if __name__ == "__main__":
    main()
