"""`python -m unhand` is the command `unhand`."""

import sys

from unhand._cli import main

if __name__ == "__main__":
    sys.exit(main())
