"""``python -m burnish``: the same as the command ``burnish``."""

from burnish.cli.main import main

main()
