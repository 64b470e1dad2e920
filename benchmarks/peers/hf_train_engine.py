"""The plain Hugging Face training loop as a peer: padded rows, full logits, gradient checkpointing, torch's fused AdamW."""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers import protocol
from benchmarks.train_work import TrainWork


def start(settings: dict[str, Any]) -> tuple[Callable[[protocol.Work], dict[str, Any]], dict[str, Any]]:
    """The model, its optimizer and the rows.

    Args:
        settings: ``model`` (a folder), ``device``, ``precision`` ("bfloat16": weights and moments too, "autocast": bfloat16
            products of float32 weights, "float32"), ``work`` (`TrainWork`), ``micro_batch_size`` (rows),
            ``gradient_checkpointing``, ``lr``.
    """
    begin = time.perf_counter()
    loop = Loop(settings)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return lambda work: loop.update(), {"versions": versions, "start_seconds": time.perf_counter() - begin}


class Loop:
    """See `start`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device = torch.device(settings["device"])
        self.micro_batch_size = settings["micro_batch_size"]
        dtype = torch.bfloat16 if settings["precision"] == "bfloat16" else torch.float32
        self.autocast = settings["precision"] == "autocast"
        model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(self.device).train()
        self.model.config.use_cache = False
        if settings["gradient_checkpointing"]:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings["lr"], weight_decay=0.01, fused=True)
        work = TrainWork(**settings["work"])
        self.prompt = work.prompt
        self.tensors = work.tensors(self.model.config.vocab_size)
        self.num_tokens = int(self.tensors["attention_mask"].sum())

    def update(self) -> dict[str, Any]:
        """One update of all rows; its seconds."""
        self._synchronize()
        begin = time.perf_counter()
        num_labels = int(self.tensors["loss_mask"].sum())
        total = 0.0
        for first in range(0, len(self.tensors["input_ids"]), self.micro_batch_size):
            part = {name: x[first : first + self.micro_batch_size].to(self.device) for name, x in self.tensors.items()}
            loss = self._loss(part) / num_labels
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._synchronize()
        seconds = time.perf_counter() - begin
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        return {"seconds": seconds, "tokens": self.num_tokens, "loss": total, "memory_gib": memory}

    def _loss(self, part: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
        log_probs = logits[:, self.prompt - 1 : -1].float().log_softmax(-1)
        log_prob = log_probs.gather(-1, part["responses"][..., None])[..., 0]
        ratio = (log_prob - log_prob.detach()).exp()
        unclipped = -part["advantages"] * ratio
        clipped = -part["advantages"] * ratio.clamp(0.8, 1.2)
        return torch.where(part["loss_mask"], torch.maximum(unclipped, clipped), 0.0).sum()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    protocol.serve(start)
