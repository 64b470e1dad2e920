"""``python -m burnish.cli``: the same as the command ``burnish``."""

from burnish.cli.main import main

main()
