"""How a benchmark talks to a peer: one JSON object a line, requests on its stdin and answers on its stdout.

A peer runs in the interpreter of its own environment, so this file imports nothing but Python's own. Peer and benchmark
take turns: only one of them computes at any time.

1. the benchmark starts ``python -m benchmarks.peers.NAME SETTINGS`` with the settings as JSON;
2. the peer answers ``{"ready": true, ...}`` when its engine stands;
3. to each `work` it answers ``{"seconds": ..., "tokens": ..., "mean_log_prob": ...}``, or ``{"error": ...}``;
   where a work has ``eos_token_ids``, responses end at those, and the answer has ``responses`` (token ids) for the last of these;
4. it ends when its stdin does.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Work = dict[str, Any]
"""``prompts`` (token ids), ``n`` samples of each, ``max_new_tokens`` (a list: of each response, prompt by prompt), ``seed``."""


def own_stdout() -> TextIO:
    """A stream to the benchmark; whatever libraries print goes to stderr from now on."""
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return stream


def serve(start: Callable[[dict[str, Any]], tuple[Callable[[Work], dict[str, Any]], dict[str, Any]]]) -> None:
    """Runs a peer.

    Args:
        start: given the settings, makes the engine; returns the function that does one work, and what to tell of it.
    """
    answers = own_stdout()

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        run, facts = start(json.loads(sys.argv[1]))
        answer({"ready": True, **facts})
        for line in sys.stdin:
            answer(run(json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error
