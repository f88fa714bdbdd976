"""``python -m fuzz``: all parts; status 1 if anything failed."""

from __future__ import annotations

from .parts import main

if __name__ == "__main__":  # the processes that it starts import it too
    raise SystemExit(main())
