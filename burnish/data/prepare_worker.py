"""A process that prepares rows: reads a pickled `Preparer`, then chunks of rows, and writes each chunk prepared.

Started by `burnish.data.prepare`, which is the only one to write to it; the end of its input ends it.
"""

import os
import pickle
import sys


def main() -> None:
    """Serves until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    # What a library prints must not get among the answers.
    os.dup2(2, 1)
    preparer = pickle.load(sys.stdin.buffer)
    while True:
        try:
            chunk = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(list(preparer.prepare(chunk)), answers)
        answers.flush()


if __name__ == "__main__":
    main()
