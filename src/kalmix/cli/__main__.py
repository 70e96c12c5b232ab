"""Entry point of `python -m kalmix.cli`, which equals `kalmix`."""

from kalmix.cli import main

if __name__ == "__main__":
    main()
