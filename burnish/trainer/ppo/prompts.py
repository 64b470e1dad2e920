"""The prompts of training: batches without an end, and the rows that are made of them."""

from collections.abc import Iterator
from typing import Any

from burnish.data import takes_feedback
from burnish.data.place import for_workers
from burnish.protocol import DataProto, object_array
from burnish.trainer.ppo.stages import PROMPT_TENSORS
from burnish.utils.errors import TrainingError
from burnish.workers.early_scoring import PROMPT_COLUMNS


class PromptStream(Iterator[dict[str, Any]]):
    """The training prompts, batch after batch and epoch after epoch.

    Steps and the further rounds of dynamic sampling draw from one stream, so that no prompt comes twice in an epoch.

    Args:
        dataloader: gives one epoch each time that it is iterated; its ``state_dict`` is the place in it.

    Attributes:
        epoch: of the batch that was drawn last, counted from 0.
    """

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader
        self.epoch = 0
        generator = getattr(dataloader, "generator", None)
        self._seed = 0 if generator is None else generator.initial_seed()
        self._batches: Iterator[dict[str, Any]] | None = None

    def __next__(self) -> dict[str, Any]:
        """The next batch.

        Raises:
            TrainingError: two epochs gave none, as those of a sampler without rows do.
        """
        # What is left of the epoch of a checkpoint may be nothing.
        for _ in range(3):
            if self._batches is None:
                self._seed_readers()
                self._batches = iter(self.dataloader)
            batch_dict = next(self._batches, None)
            if batch_dict is not None:
                return batch_dict
            self._batches = None
            self.epoch += 1
        raise TrainingError(
            f"Epoch {self.epoch - 1}: the data loader gave no batch, and none in the epoch before. A sampler of your "
            f"own (data.sampler) has to give at least data.train_batch_size rows an epoch."
        )

    def _seed_readers(self) -> None:
        # Processes that read ahead are seeded from this generator, by the epoch: a resumed run has drawn less from it.
        generator = getattr(self.dataloader, "generator", None)
        if generator is not None:
            generator.manual_seed((self._seed * 1_000_003 + self.epoch) % 2**63)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of one pass over the data."""
        return len(self.dataloader)

    @property
    def _sampler(self) -> Any:
        return getattr(self.dataloader, "sampler", None)

    def take_scores(self, batch: DataProto) -> None:
        """Tells the sampler, where it asks (``update(batch)``), how responses scored: those of every round, also the ones that
        dynamic sampling leaves out."""
        if takes_feedback(self._sampler):
            self._sampler.update(batch)

    def end_step(self, batch: DataProto) -> None:
        """Tells the dataset, where it asks (``on_batch_end(batch)``), what became of a step's batch."""
        on_batch_end = getattr(getattr(self.dataloader, "dataset", None), "on_batch_end", None)
        if on_batch_end is not None:
            on_batch_end(batch=batch)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and the scores that a curriculum has gathered."""
        state = {"epoch": self.epoch, "dataloader": self.dataloader.state_dict()}
        if hasattr(self._sampler, "feedback_state"):
            state["feedback"] = self._sampler.feedback_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at a place that `state_dict` gave; other keys of ``state`` are not looked at."""
        self.epoch = state["epoch"]
        # Before the place: the order of the epoch follows from it.
        if hasattr(self._sampler, "load_feedback_state") and "feedback" in state:
            self._sampler.load_feedback_state(state["feedback"])
        place = state["dataloader"]
        if "_iterator_finished" in place:
            place = for_workers(place, getattr(self.dataloader, "num_workers", 0), seed=self._seed)
        self.dataloader.load_state_dict(place)
        # What was drawn so far was drawn from the place before.
        self._batches = None


def repeat_prompts(batch_dict: dict[str, Any], *, n: int, uid_prefix: str, pad_token_id: int) -> DataProto:
    """A batch of the data loader as `DataProto`, each prompt ``n`` times in a row.

    The ``uid`` of a group is its epoch (or "val") and row, not a random number: the random streams of its responses follow
    from it and from ``sample_index``, 0 to n - 1.
    """
    batch = DataProto.from_single_dict(batch_dict, meta_info={"pad_token_id": pad_token_id})
    batch.non_tensor_batch["uid"] = object_array([f"{uid_prefix}-{row}" for row in batch.non_tensor_batch["uid"]])
    num_prompts = len(batch)
    batch = batch.repeat(n, interleave=True)
    batch.non_tensor_batch["sample_index"] = object_array(list(range(n)) * num_prompts)
    return batch


def take_prompts(batch: DataProto, *, are_scored: bool) -> DataProto:
    """What the rollout is given: the prompts' tensors, which are taken out of ``batch``, and the columns that name each row.

    Args:
        are_scored: the rollout has the responses scored as they end, for which it gets the reward's columns too.
    """
    prompts = batch.pop(batch_keys=PROMPT_TENSORS)
    columns = ("uid", "sample_index", *(PROMPT_COLUMNS if are_scored else ()))
    prompts.non_tensor_batch = {key: batch.non_tensor_batch[key] for key in columns if key in batch.non_tensor_batch}
    return prompts
