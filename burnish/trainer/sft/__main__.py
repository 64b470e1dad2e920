"""``python -m burnish.trainer.sft``."""

import sys

from burnish.trainer.sft.main import main

if __name__ == "__main__":
    sys.exit(main())
