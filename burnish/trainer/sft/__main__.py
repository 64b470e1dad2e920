"""``python -m burnish.trainer.sft``."""

import sys

from burnish.utils.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    # Before all that takes time to load.
    end_at_ctrl_c()
    from burnish.trainer.sft.main import main

    sys.exit(main())
