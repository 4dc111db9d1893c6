"""`python -m pagedjax`: the command line."""

from pagedjax.cli import script

if __name__ == "__main__":
    script()
