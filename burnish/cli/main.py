"""Where the command ``burnish`` begins; `burnish.cli.app` declares what it does."""

from __future__ import annotations

import os
import sys

from burnish.utils.interrupts import end_at_ctrl_c


def main() -> None:
    """Entry point."""
    # Before all that takes time to load, which is nearly everything: this module imports nothing else.
    end_at_ctrl_c()
    from burnish.cli.app import app

    # As under `python -m`, so that plug-ins of the working folder are found by package.module:attribute, by workers too.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    app()


if __name__ == "__main__":
    main()
