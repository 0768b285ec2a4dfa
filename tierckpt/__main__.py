"""``python -m tierckpt`` is the command ``tierckpt``."""

from __future__ import annotations

import sys

from tierckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
