"""``python -m burnish.trainer.sft_trainer``: `burnish.trainer.sft` by the path that scripts for verl have."""

import runpy

if __name__ == "__main__":
    runpy.run_module("burnish.trainer.sft", run_name="__main__")
