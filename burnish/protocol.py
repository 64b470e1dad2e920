# ruff: noqa: E501 (the table of keys reads as a table)
"""``DataProto``, the one currency between stages, workers and processes, and the table of the keys it carries.

Tensors in a batch are values: a stage adds keys and never writes into a tensor that it was given. Slices and chunks are
views, and a batch that came through Ray's object store is a view of memory that other processes read; who must write
takes ``data.select(deepcopy=True)``.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from burnish._protocol import serialisation, tensordicts
from burnish._protocol.equality import same_tensor
from burnish._protocol.futures import fetch, take_chunk
from burnish._protocol.joining import (
    check_same_keys,
    concat_meta_info,
    object_array,
    pick,
    union_numpy_dict,
    union_two_dict,
)
from burnish._protocol.keys import PAD_TOKEN, BatchKey, PadSide
from burnish._protocol.padding import align, check_same_shapes
from burnish._protocol.rows import DataProtoItem, Rows, pad_dataproto_to_divisor, unpad_dataproto
from burnish.utils.errors import BatchError

__all__ = [
    "BATCH_KEYS", "STAGES", "BatchKey", "DataProto", "DataProtoFuture", "DataProtoItem", "object_array",
    "pad_dataproto_to_divisor", "union_numpy_dict", "union_tensor_dict", "union_two_dict", "unpad_dataproto",
]  # fmt: skip

STAGES = ("prompts", "rollout", "reward", "log_probs", "values", "advantages", "updates")
"""The stages of one step that add keys, in order."""

_I, _F, _B = torch.int64, torch.float32, torch.bool
_BOTH: PadSide = "prompt_response"

# fmt: off
BATCH_KEYS: dict[str, BatchKey] = {
    # key                              stage         pad      pad value  when                    meaning, dtype
    "input_ids":              BatchKey("prompts",    _BOTH,   PAD_TOKEN, "",                     "token ids of the prompt, from the rollout on followed by the response", _I),
    "attention_mask":         BatchKey("prompts",    _BOTH,   False,     "",                     "true where input_ids holds a token, false on padding", _B),
    "position_ids":           BatchKey("prompts",    _BOTH,   0,         "",                     "position of each token in its sequence, from 0; no meaning on padding", _I),
    "uid":                    BatchKey("prompts",    None,    "",        "",                     "epoch and row of the prompt; the samples of one prompt share it"),
    "raw_prompt":             BatchKey("prompts",    None,    "",        "",                     "messages (list of dicts) or text before rendering"),
    "data_source":            BatchKey("prompts",    None,    "",        "",                     "name of the data set, decides the scoring function"),
    "reward_model":           BatchKey("prompts",    None,    "",        "",                     "dict with ground_truth"),
    "extra_info":             BatchKey("prompts",    None,    "",        "",                     "dict handed to the scoring function as it is"),
    "validation_set":         BatchKey("prompts",    None,    "",        "validation sets have names", "name of the row's validation set"),
    "sample_index":           BatchKey("rollout",    None,    "",        "",                     "number of the sample among the rollout.n of its prompt"),
    "prompts":                BatchKey("rollout",    "left",  PAD_TOKEN, "",                     "token ids of the prompt", _I),
    "responses":              BatchKey("rollout",    "right", PAD_TOKEN, "",                     "token ids after the prompt", _I),
    "response_mask":          BatchKey("rollout",    "right", False,     "",                     "true where the policy sampled the token; never changes", _B),
    "rollout_log_probs":      BatchKey("rollout",    "right", 0.0,       "",                     "log softmax(logits / T) of each token, by the rollout engine", _F),
    "rollout_truncated_log_probs": BatchKey("rollout", "right", 0.0,     "top_p, top_k, min_p, repetition_penalty, min_new_tokens", "log-prob of each token in the distribution that it was drawn from", _F),
    "policy_version":         BatchKey("rollout",    None,    0,         "",                     "trainer step after which the rollout got the weights that sampled the row's first token", _I),
    "last_policy_version":    BatchKey("rollout",    None,    0,         "",                     "the same of its last token; another where the weights were updated in between", _I),
    "num_preemptions":        BatchKey("rollout",    None,    0,         "",                     "how often the row lost its place in the cache and was filled in again", _I),
    "finish_reason":          BatchKey("rollout",    None,    "",        "",                     "stop, length or abort"),
    "reward_baselines":       BatchKey("rollout",    None,    0.0,       "adv_estimator=remax",  "score of the greedy response to the row's prompt, NaN where it has none", _F),
    "token_level_scores":     BatchKey("reward",     "right", 0.0,       "",                     "score on the token it is for, usually the last one sampled", _F),
    "valid":                  BatchKey("reward",     None,    False,     "",                     "false where the row could not be scored", _B),
    "reward_components":      BatchKey("reward",     None,    0.0,       "adv_estimator=gdpo",   "the numbers that gdpo_reward_keys names, one column each", _F),
    "rm_scores":              BatchKey("reward",     "right", 0.0,       "reward model",         "score of the reward model, on the last token", _F),
    "old_log_probs":          BatchKey("log_probs",  "right", 0.0,       "",                     "log-prob of each token under the policy before the updates", _F),
    "ref_log_prob":           BatchKey("log_probs",  "right", 0.0,       "KL in reward or loss", "log-prob of each token under the reference", _F),
    "sum_pi_squared":         BatchKey("log_probs",  "right", 0.0,       "optimal token baseline", "sum over the vocabulary of squared probabilities", _F),
    "values":                 BatchKey("values",     "right", 0.0,       "critic",               "value of the state before each token", _F),
    "token_level_rewards":    BatchKey("advantages", "right", 0.0,       "",                     "scores, less the KL penalty if it is in the reward", _F),
    "advantages":             BatchKey("advantages", "right", 0.0,       "",                     "advantage of each token", _F),
    "returns":                BatchKey("advantages", "right", 0.0,       "",                     "what the critic is to predict before each token", _F),
    "loss_mask":              BatchKey("advantages", "right", False,     "",                     "true where the token is trained on", _B),
    "rollout_is_weights":     BatchKey("advantages", "right", 0.0,       "rollout correction",   "importance weight of each token", _F),
    "choice_noise":           BatchKey("updates",    "right", 0.0,       "loss chooses tokens",  "uniform in [0, 1), decides which tokens a policy loss draws", _F),
    "mini_batch_id":          BatchKey("updates",    None,    0,         "",                     "number of the mini-batch the row belongs to", _I),
}
# fmt: on


@dataclass(eq=False, repr=False)
class DataProto(Rows):
    """Rows: tensors ``[batch, ...]``, any other values as object arrays ``[batch]``, and facts about all of them.

    Attributes:
        batch: tensors, all with the same first dimension; ``None`` when there are none.
        non_tensor_batch: one-dimensional object arrays of the same length.
        meta_info: whatever belongs to the whole batch.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    # Making one, and taking it apart.

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> "DataProto":
        """From one dict of tensors and of arrays or lists, as a collate function returns it.

        Raises:
            BatchError: another kind of value, or different numbers of rows.
        """
        tensors, non_tensors = {}, {}
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, (np.ndarray, list, tuple)):
                non_tensors[key] = value
            else:
                raise BatchError(
                    f"The key {key!r} is a {type(value).__name__}; a batch holds tensors, arrays or lists."
                )
        return cls.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info=meta_info)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Sequence | np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> "DataProto":
        """From tensors ``[batch, ...]`` and from arrays or lists, which become one-dimensional object arrays.

        Raises:
            BatchError: the numbers of rows differ.
        """
        batch = None
        if tensors:
            sizes = {key: list(tensor.shape[:1]) for key, tensor in tensors.items()}
            size = next(iter(sizes.values()))
            if not size or any(other != size for other in sizes.values()):
                raise BatchError(f"All tensors of a batch need the same first dimension, not {sizes}.")
            batch = TensorDict(dict(tensors), batch_size=size)
        arrays = {key: object_array(value) for key, value in (non_tensors or {}).items()}
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=dict(meta_info or {}))

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> "DataProto":
        """The inverse of :meth:`to_tensordict`: stacks of non-tensors are rows, single ones are ``meta_info``."""
        tensors, non_tensors, meta = tensordicts.take_apart(tensor_dict)
        batch = TensorDict(tensors, batch_size=tensor_dict.batch_size) if tensors else None
        return cls(batch=batch, non_tensor_batch=non_tensors, meta_info={**meta, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """Everything in one TensorDict: arrays as ``NonTensorStack``, ``meta_info`` as ``NonTensorData``.

        Raises:
            BatchError: a key is in two of the three parts.
        """
        return tensordicts.put_together(self._tensors(), self.non_tensor_batch, self.meta_info, len(self))

    def check_consistency(self) -> None:
        """Raises ``BatchError`` unless all keys have the same number of rows and the right kind of value."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise BatchError(f"A batch has one batch dimension, not {list(self.batch.batch_size)}.")
        for key, tensor in self._tensors().items():
            if not isinstance(tensor, torch.Tensor):
                raise BatchError(f"The batch key {key!r} is a {type(tensor).__name__} and not a tensor.")
        for key, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or not values.ndim:
                raise BatchError(
                    f"The non-tensor key {key!r} is a {type(values).__name__} and not an array with one value a row; "
                    f"DataProto.from_dict makes arrays of lists."
                )
            if len(values) != len(self):
                raise BatchError(f"The non-tensor key {key!r} has {len(values)} rows, the batch has {len(self)}.")

    # Looking at it.

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def __repr__(self) -> str:
        tensors = (f"{k} {str(t.dtype)[6:]}{list(t.shape)}" for k, t in self._tensors().items())
        keys = ", ".join(itertools.chain(tensors, self.non_tensor_batch))
        return f"DataProto({len(self)} rows: {keys}; meta_info: {', '.join(map(str, self.meta_info))})"

    def nbytes(self) -> int:
        """Bytes of the tensors' values; non-tensor values are not counted."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def tensors(self) -> TensorDict:
        """``batch``, where there has to be one.

        Raises:
            BatchError: there are no tensors.
        """
        if self.batch is None:
            raise BatchError(f"The batch has no tensors, only {', '.join(self.non_tensor_batch) or 'nothing'}.")
        return self.batch

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else {str(key): self.batch.get(key) for key in self.batch.keys()}  # noqa: SIM118

    # Rows.

    def _map_rows(
        self, of_tensor: Callable[[torch.Tensor], torch.Tensor], of_array: Callable[[np.ndarray], np.ndarray]
    ) -> "DataProto":
        batch = None
        if self.batch is not None:
            tensors = {key: of_tensor(tensor) for key, tensor in self._tensors().items()}
            num_rows = len(of_array(np.empty(len(self), dtype=bool)))
            batch = TensorDict(tensors, batch_size=[num_rows], device=self.batch.device)
        arrays = {key: of_array(values) for key, values in self.non_tensor_batch.items()}
        return DataProto(batch, arrays, dict(self.meta_info))

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """All rows one after the other; different widths are padded by :data:`BATCH_KEYS`.

        ``meta_info`` must agree where two parts have the same key, but for ``metrics`` (a dict, or a list of dicts, a
        part), which becomes one dict of lists with an entry a part. Parts without any key add their ``meta_info`` only.

        Raises:
            BatchError: nothing to join, different keys, widths that the table cannot reconcile, contradicting facts.
        """
        if not data:
            raise BatchError("There is nothing to concatenate: the list of batches is empty.")
        meta_info = concat_meta_info([part.meta_info for part in data])
        parts = [part for part in data if part.batch is not None or part.non_tensor_batch]
        if not parts:
            return DataProto(meta_info=meta_info)
        check_same_keys("tensor", [part._tensors().keys() for part in parts])
        check_same_keys("non-tensor", [part.non_tensor_batch.keys() for part in parts])
        arrays = {
            key: np.concatenate([object_array(part.non_tensor_batch[key]) for part in parts])
            for key in parts[0].non_tensor_batch
        }
        if parts[0].batch is None:
            return DataProto(non_tensor_batch=arrays, meta_info=meta_info)
        aligned = align([part._tensors() for part in parts], BATCH_KEYS, meta_info.get("pad_token_id") or 0)
        check_same_shapes(aligned)
        tensors = {key: torch.cat([batch[key] for batch in aligned]) for key in aligned[0]}
        return DataProto(TensorDict(tensors, batch_size=[sum(map(len, parts))]), arrays, meta_info)

    # Keys.

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """A DataProto of these keys (``None``: all), sharing the values unless ``deepcopy``.

        Raises:
            BatchError: no such key.
        """
        batch = None
        if self.batch is not None:
            tensors = pick(self._tensors(), batch_keys, "tensor")
            batch = TensorDict(tensors, batch_size=self.batch.batch_size, device=self.batch.device)
        elif batch_keys is not None:
            pick({}, batch_keys, "tensor")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor")
        result = DataProto(batch, arrays, pick(self.meta_info, meta_info_keys, "meta_info"))
        return copy.deepcopy(result) if deepcopy else result

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> "DataProto":
        """Takes these keys (``None``: none) out of this DataProto and returns them as another.

        Raises:
            BatchError: no such key; nothing was taken then.
        """
        tensors = pick(self._tensors(), batch_keys or (), "tensor")
        arrays = pick(self.non_tensor_batch, non_tensor_batch_keys or (), "non-tensor")
        meta_info = pick(self.meta_info, meta_info_keys or (), "meta_info")
        popped = DataProto.from_dict(tensors, arrays, meta_info)
        for key in tensors:
            self.batch.del_(key)  # type: ignore[union-attr]
        for key in arrays:
            del self.non_tensor_batch[key]
        for key in meta_info:
            del self.meta_info[key]
        return popped

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> "DataProto":
        """Renames tensor or non-tensor keys in place and returns self.

        Raises:
            BatchError: lists of different lengths, no such key, or a new name that is taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new):
            raise BatchError(f"rename needs as many new keys as old ones: {old} and {new}.")
        names = dict(zip(old, new, strict=True))
        tensors, arrays = self._tensors(), self.non_tensor_batch
        pick({**tensors, **arrays}, old, "tensor or non-tensor")
        result = [names.get(key, key) for key in itertools.chain(tensors, arrays)]
        if len(set(result)) < len(result):
            raise BatchError(f"Renaming {old} to {new} would give two keys one name.")
        self.non_tensor_batch = {names.get(key, key): values for key, values in arrays.items()}
        if self.batch is not None:
            renamed = {names.get(key, key): tensor for key, tensor in tensors.items()}
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size, device=self.batch.device)
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Adds the keys of ``other``, which has the same rows, in place and returns self.

        Where the two are padded to different widths, both are padded to the wider by :data:`BATCH_KEYS`.

        Raises:
            BatchError: a key that both have is not equal in both (up to padding), or the rows differ in number.
        """
        has_rows = [part for part in (self, other) if part.batch is not None or part.non_tensor_batch]
        if len(has_rows) == 2 and len(self) != len(other):
            raise BatchError(f"A batch of {len(self)} rows cannot take keys of a batch of {len(other)} rows.")
        meta_info = union_two_dict(self.meta_info, other.meta_info)
        arrays = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        if self.batch is None or other.batch is None:
            batch = self.batch if other.batch is None else copy.copy(other.batch)
        else:
            batch = union_tensor_dict(self.batch, other.batch, meta_info.get("pad_token_id") or 0)
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta_info
        return self

    # Places: devices, processes, disk.

    def to(self, device: torch.device | str) -> "DataProto":
        """Moves the tensors to ``device``, in place, and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def __copy__(self) -> "DataProto":
        """New containers, the same values: adding or removing keys of one does not show in the other."""
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataProto":
        batch = None if self.batch is None else self.batch.clone()
        arrays = copy.deepcopy(self.non_tensor_batch, memo)
        return DataProto(batch, arrays, copy.deepcopy(self.meta_info, memo))

    def __getstate__(self) -> dict[str, Any]:
        """NumPy views, which pickle protocol 5 hands on out of band: no copy through Ray's object store."""
        return {
            "num_rows": None if self.batch is None else self.batch.batch_size[0],
            "tensors": {key: serialisation.to_numpy(tensor) for key, tensor in self._tensors().items()},
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {key: serialisation.from_numpy(pickled) for key, pickled in state["tensors"].items()}
        self.batch = None if state["num_rows"] is None else TensorDict(tensors, batch_size=[state["num_rows"]])
        self.non_tensor_batch = state["non_tensor_batch"]
        self.meta_info = state["meta_info"]

    def save_to_disk(self, filepath: str) -> None:
        """Writes one safetensors file, in which non-tensor values and ``meta_info`` are JSON; nothing is pickled.

        Raises:
            BatchError: a value that JSON would not give back as it was, naming its key.
        """
        num_rows = None if self.batch is None else len(self)
        serialisation.write(filepath, self._tensors(), num_rows, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(filepath: str) -> "DataProto":
        """Reads what :meth:`save_to_disk` wrote.

        Raises:
            BatchError: the file is missing, damaged or of another kind.
        """
        tensors, document = serialisation.read(filepath)
        num_rows = document["num_rows"]
        batch = None if num_rows is None else TensorDict(tensors, batch_size=[num_rows])
        arrays = {key: object_array(values) for key, values in document["non_tensor_batch"].items()}
        return DataProto(batch, arrays, document["meta_info"])


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict, pad_token_id: int = 0) -> TensorDict:
    """A TensorDict with the keys of both; see :meth:`DataProto.union`. Neither argument changes."""
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = list(tensor_dict1.batch_size), list(tensor_dict2.batch_size)
        raise BatchError(f"Batches of sizes {sizes[0]} and {sizes[1]} cannot be joined key by key.")
    tensors: list[dict[str, Any]] = [dict(part.items()) for part in (tensor_dict1, tensor_dict2)]  # type: ignore[arg-type]
    first, second = align(tensors, BATCH_KEYS, pad_token_id)
    mask = first.get("attention_mask", second.get("attention_mask"))
    for key in first.keys() & second.keys():
        # Positions of padding are arbitrary; every other key has one pad value.
        where = mask.bool() if key == "position_ids" and mask is not None and mask.shape == first[key].shape else None
        if not same_tensor(first[key], second[key], where):
            raise BatchError(f"Both batches have the tensor {key!r}, with different values. Drop or rename one.")
    return TensorDict({**second, **first}, batch_size=tensor_dict1.batch_size, device=tensor_dict1.device)


@dataclass
class DataProtoFuture:
    """A DataProto that workers are still computing; it may be passed on to other workers before it is there.

    Attributes:
        collect_fn: makes one DataProto of the workers' results, usually :meth:`DataProto.concat`.
        futures: one a worker: Ray object references, concurrent futures, or the results themselves.
        dispatch_fn: takes a part of the collected DataProto, for one receiver of several.
        fetch_fn: waits for ``futures`` and returns their values in order; a controller that watches for dead workers
            gives its own.
    """

    collect_fn: Callable[[list[DataProto]], DataProto]
    futures: list[Any]
    dispatch_fn: Callable[[DataProto], DataProto] | None = None
    fetch_fn: Callable[[list[Any]], list[Any]] = fetch

    @staticmethod
    def concat(data: list[Any]) -> "DataProtoFuture":
        """The future of the concatenation of ``data``, a list of futures of DataProtos."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=data)

    def chunk(self, chunks: int) -> list["DataProtoFuture"]:
        """Futures of ``chunks`` equal parts; nothing is waited for."""
        parts = [partial(take_chunk, index=index, chunks=chunks) for index in range(chunks)]
        return [DataProtoFuture(self.collect_fn, self.futures, part, self.fetch_fn) for part in parts]

    def get(self) -> DataProto:
        """Waits for the workers and returns the result.

        Raises:
            BatchError: a worker returned something else than a DataProto.
        """
        results = self.fetch_fn(self.futures)
        for number, result in enumerate(results):
            if not isinstance(result, (DataProto, TensorDict)):
                raise BatchError(f"Future {number} gave a {type(result).__name__} and not a DataProto.")
        collected = self.collect_fn(results)
        return collected if self.dispatch_fn is None else self.dispatch_fn(collected)
