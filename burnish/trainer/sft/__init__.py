"""Supervised fine-tuning: ``burnish sft key=value ...`` or ``python -m burnish.trainer.sft``.

`main` builds a run and lives it as reinforcement learning does, `trainer` is its loop, `validation` measures the loss on rows
that are not trained on, `plan` says beforehand what a step is and what it takes.
"""
