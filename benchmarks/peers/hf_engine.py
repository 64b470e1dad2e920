"""transformers' ``generate`` as a peer, with its own attention and sampling, log-probs gathered step by step."""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, StoppingCriteria

from benchmarks.peers import protocol


def start(settings: dict[str, Any]) -> tuple[Callable[[protocol.Work], dict[str, Any]], dict[str, Any]]:
    """The model.

    Args:
        settings: ``model`` (a folder), ``dtype``, ``device``.
    """
    begin = time.perf_counter()
    model = load(settings["model"], settings["dtype"], settings["device"])
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return lambda work: run(model, work), {"versions": versions, "start_seconds": time.perf_counter() - begin}


def load(path: str, dtype: str, device: str) -> Any:
    """The model, without defaults of its own for drawing and ending: they would fill in for what a call leaves out."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig()
    return model.to(device).eval()


def run(model: Any, work: protocol.Work) -> dict[str, Any]:
    """Seconds of all calls of ``generate`` on batches of ``work["batch_size"]`` responses, in their order."""
    torch.manual_seed(work["seed"])
    if "eos_token_ids" in work:
        return draw(model, work)
    prompts = [ids for ids in work["prompts"] for _ in range(work["n"])]
    lengths = work["max_new_tokens"]
    size = work["batch_size"]
    total = 0.0
    begin = time.perf_counter()
    for first in range(0, len(prompts), size):
        total += generate(model, prompts[first : first + size], lengths[first : first + size])
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": sum(lengths), "mean_log_prob": total / sum(lengths)}


@torch.no_grad()
def draw(model: Any, work: protocol.Work) -> dict[str, Any]:
    """Responses that end as the model has them end; the prompts of one length share calls."""
    begin = time.perf_counter()
    ends, most = work["eos_token_ids"], max(work["max_new_tokens"])
    rows = [ids for ids in work["prompts"] for _ in range(work["n"])]
    responses: list[list[int]] = [[] for _ in rows]
    by_length: dict[int, list[int]] = {}
    for row, ids in enumerate(rows):
        by_length.setdefault(len(ids), []).append(row)
    for length, members in by_length.items():
        for first in range(0, len(members), work["batch_size"]):
            batch = members[first : first + work["batch_size"]]
            input_ids = torch.tensor([rows[row] for row in batch], device=model.device)
            sequences = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=GenerationConfig(
                    max_new_tokens=most,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=ends[0],
                    eos_token_id=ends,
                    use_cache=True,
                ),
            )
            for row, drawn in zip(batch, sequences[:, length:].tolist(), strict=True):
                last = next((place for place, token in enumerate(drawn) if token in ends), len(drawn) - 1)
                responses[row] = drawn[: last + 1]
    tokens = sum(map(len, responses))
    return {"seconds": time.perf_counter() - begin, "tokens": tokens, "responses": responses}


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """One batch; the sum of the log-probs of the tokens that were asked for."""
    input_ids = torch.tensor(prompts, device=model.device)
    limits = torch.tensor(lengths, device=model.device)
    gather = GatherLogProbs(input_ids.shape[1])
    # Without a stop token every row runs to the longest length unless it is told its own.
    end = EndAt(limits + input_ids.shape[1])
    sequences = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=GenerationConfig(
            max_new_tokens=max(lengths),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=True,
        ),
        logits_processor=[gather],
        stopping_criteria=[end] if len(set(lengths)) > 1 else [],
    )
    gather.add(sequences)
    log_probs = torch.stack(gather.log_probs, dim=1)
    if log_probs.shape[1] != max(lengths):
        raise RuntimeError(f"generate made {log_probs.shape[1]} tokens where {max(lengths)} were asked for.")
    wanted = torch.arange(log_probs.shape[1], device=model.device) < limits[:, None]
    return float(log_probs.double().masked_fill(~wanted, 0).sum())


class GatherLogProbs(LogitsProcessor):
    """Keeps the scores of one step, from which the next step's sequences say what was drawn: no memory for all steps."""

    def __init__(self, prompt_length: int) -> None:
        self._scores: torch.Tensor | None = None
        self.log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.add(input_ids)
        self._scores = scores
        return scores

    def add(self, sequences: torch.Tensor) -> None:
        """Log-probs [rows] of the newest tokens."""
        if self._scores is not None:
            drawn = self._scores.gather(1, sequences[:, -1:]).squeeze(1)
            self.log_probs.append(drawn.float() - self._scores.float().logsumexp(1))


class EndAt(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return self._lengths <= input_ids.shape[1]


if __name__ == "__main__":
    protocol.serve(start)
