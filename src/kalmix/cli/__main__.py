"""`python -m kalmix.cli` is `kalmix`."""

from kalmix.cli import main

if __name__ == "__main__":
    main()
