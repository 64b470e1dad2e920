"""The work of the GRPO benchmark, the same for burnish and its peer; read by both interpreters, so nothing heavy is imported."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GRPOWork:
    """One step: ``prompts`` prompts, ``samples`` responses to each, every one of them of its full length, one update."""

    prompts: int
    samples: int
    prompt_length: int
    response_length: int

    @property
    def num_rows(self) -> int:
        """Responses of a step."""
        return self.prompts * self.samples

    @property
    def num_response_tokens(self) -> int:
        """Tokens that a step samples."""
        return self.num_rows * self.response_length

    def describe(self) -> str:
        """For people."""
        return (
            f"{self.prompts} prompts x {self.samples} samples, {self.prompt_length} + {self.response_length} tokens, "
            f"one update"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


CPU_WORK = GRPOWork(prompts=8, samples=8, prompt_length=40, response_length=32)
GPU_WORK = GRPOWork(prompts=32, samples=8, prompt_length=128, response_length=256)


def prompt_texts(work: GRPOWork, vocab_size: int, count: int, seed: int = 0) -> list[str]:
    """Prompts of random tokens as text for `benchmarks.models.word_tokenizer_path`; the first ids are special and left out."""
    draw = random.Random(seed)
    return [" ".join(str(draw.randrange(3, vocab_size)) for _ in range(work.prompt_length)) for _ in range(count)]


def score(text: str) -> float:
    """A reward that costs nothing and differs among responses: the share of even digits in the text."""
    digits = [character for character in text if character.isdigit()]
    return sum(character in "02468" for character in digits) / max(1, len(digits))


def measured_run(
    *,
    prompts: int,
    prompt_length: int,
    response_length: int,
    steps: int,
    device: str,
    folder: str | Path,
    gpus: int = 1,
) -> dict[str, Any]:
    """Keys of a short run that is measured: rows given from Python, nothing validated or saved, its files in ``folder``."""
    return {
        "data.train_files": None,
        "data.val_files": None,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_length,
        "data.max_response_length": response_length,
        "trainer.total_training_steps": steps,
        "trainer.device": device,
        "trainer.n_gpus_per_node": gpus,
        "trainer.default_local_dir": str(Path(folder) / "run"),
        "trainer.logger": ["file"],
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
    }
