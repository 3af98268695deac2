"""`python -m polyaccel` is the `polyaccel` command."""

from __future__ import annotations

import sys

from polyaccel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
