"""Writes the responses of a step."""

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.trainer.rollout_store.layout import NOTES, extra_field, texts_path, tokens_path
from burnish.utils.json_lines import plain, replacing, write_atomically

if TYPE_CHECKING:
    from burnish.protocol import DataProto

_LISTS = {
    # column               key in the batch               dtype
    "rollout_log_probs": ("rollout_log_probs", np.float32),
    "old_log_probs": ("old_log_probs", np.float32),
    "advantages": ("advantages", np.float32),
    "token_level_scores": ("token_level_scores", np.float32),
    "loss_mask": ("loss_mask", np.bool_),
    "response_mask": ("response_mask", np.bool_),
    "values": ("values", np.float32),
    "truncated_log_probs": ("rollout_truncated_log_probs", np.float32),
}
_NUMBERS = ("policy_version", "last_policy_version", "num_preemptions")
# Row groups of the token file: who looks at one response reads as many.
_ROWS_TOGETHER = 64
_PLACE_OF_UID = re.compile(r"^epoch\d+-(round\d+-)?")


def write_step(
    folder: str | Path,
    step: int,
    batch: "DataProto",
    tokenizer: Any,
    *,
    rows: Sequence[int] | None = None,
    untrained: "Iterable[DataProto]" = (),
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes both files of a step, each under a temporary name first; the texts come last, so that who finds them finds all.

    Args:
        batch: the step's, scored.
        rows: of ``batch``, in the order in which they are written; None: all.
        untrained: further scored rows of the step, which dynamic sampling has left out.
        notes: what replay wants to know of the step beside its rows; JSON.

    Returns:
        the file of the texts.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    parts = [(batch if rows is None else batch.select_idxs(list(rows)), True)]
    parts += [(part, False) for part in untrained if len(part)]
    extras = list(dict.fromkeys(key for part, _ in parts for key in part.meta_info.get("reward_extra_keys", [])))
    notes = {"step": step, "extras": extras, **(notes or {})}
    _write_tokens(tokens_path(folder, step), parts, notes)
    return write_texts(folder, step, [(part, {"trained": trained}) for part, trained in parts], tokenizer)


def write_texts(
    folder: str | Path, step: int, parts: "Sequence[tuple[DataProto, Mapping[str, Any]]]", tokenizer: Any
) -> Path:
    """Writes ``<step>.jsonl`` alone: every row of the scored batches, each with the facts that stand beside its batch."""
    path = texts_path(folder, step)
    write_atomically(
        path,
        ({"step": step, **facts, **row} for part, facts in parts for row in text_rows(part, tokenizer)),
    )
    return path


def text_rows(batch: "DataProto", tokenizer: Any) -> Iterable[dict[str, Any]]:
    """Each row of a scored batch as text, with its uid, score, validity, ground truth and the reward's extras.

    The response is all that follows the prompt, with what came between the turns of a conversation; special tokens stay.
    """
    tensors, others = batch.tensors, batch.non_tensor_batch
    prompts, responses = _token_rows(batch)
    scores = tensors["token_level_scores"].sum(-1).tolist()
    valid = tensors["valid"].tolist()
    extras = batch.meta_info.get("reward_extra_keys", [])
    for row in range(len(batch)):
        reward_model = _of(others, "reward_model", row)
        yield {
            "uid": str(others["uid"][row]),
            "sample_index": plain_or_none(_of(others, "sample_index", row)),
            "data_source": _of(others, "data_source", row),
            "prompt": tokenizer.decode(prompts[row], skip_special_tokens=False),
            "response": tokenizer.decode(responses[row], skip_special_tokens=False),
            "score": scores[row],
            "valid": bool(valid[row]),
            "ground_truth": reward_model.get("ground_truth") if isinstance(reward_model, dict) else None,
            "extra_info": _of(others, "extra_info", row),
            "finish_reason": _of(others, "finish_reason", row),
            "num_tokens": len(responses[row]),
            **{extra_field(key): plain_or_none(others[key][row]) for key in extras},
        }


def plain_or_none(value: Any) -> Any:
    """A number of numpy as one of Python."""
    return plain(value) if isinstance(value, np.generic) else value


def _of(columns: Mapping[str, np.ndarray], name: str, row: int) -> Any:
    return columns[name][row] if name in columns else None


def _token_rows(batch: "DataProto") -> tuple[list[list[int]], list[list[int]]]:
    """The ids of every prompt and of every response, without padding."""
    prompt_mask, response_mask = _token_masks(batch)
    return _split(batch.tensors["prompts"].numpy(), prompt_mask), _split(
        batch.tensors["responses"].numpy(), response_mask
    )


def _token_masks(batch: "DataProto") -> tuple[np.ndarray, np.ndarray]:
    """Where prompts [batch, prompt] and responses [batch, response] hold tokens; the tokens of tools are among them."""
    mask = batch.tensors["attention_mask"].bool().numpy()
    width = batch.tensors["responses"].shape[1]
    return mask[:, : mask.shape[1] - width], mask[:, mask.shape[1] - width :]


def _split(values: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    ends = mask.sum(-1).cumsum()
    flat = values[mask].tolist()
    return [flat[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def _write_tokens(path: Path, parts: "Sequence[tuple[DataProto, bool]]", notes: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.concat_tables([_table(part, trained) for part, trained in parts])
    table = table.replace_schema_metadata({NOTES: json.dumps(notes, default=plain).encode()})
    with replacing(path) as temporary:
        # Numbers of tokens repeat, log-probs do not.
        repeated = ["uid", "prompt_ids.list.element", "response_ids.list.element"]
        pq.write_table(
            table, temporary, row_group_size=_ROWS_TOGETHER, compression="zstd", use_dictionary=repeated
        )  # fmt: skip


def _table(batch: "DataProto", trained: bool) -> Any:
    import pyarrow as pa

    tensors, others = batch.tensors, batch.non_tensor_batch
    num_rows = len(batch)
    prompt_mask, response_mask = _token_masks(batch)
    none = np.zeros(num_rows, dtype=object)
    columns = {
        "uid": pa.array([str(uid) for uid in others["uid"]], pa.string()),
        "sample_index": pa.array([int(index) for index in others.get("sample_index", none)], pa.int32()),
        "prompt_ids": _list_array(tensors["prompts"].numpy(), prompt_mask, np.int32),
        "response_ids": _list_array(tensors["responses"].numpy(), response_mask, np.int32),
    }
    for column, (key, dtype) in _LISTS.items():
        if key in tensors:
            columns[column] = _list_array(tensors[key].numpy(), response_mask, dtype)
        else:
            columns[column] = pa.nulls(num_rows, pa.list_(pa.from_numpy_dtype(dtype)))
    if "reward_baselines" in tensors:
        columns["reward_baseline"] = pa.array(tensors["reward_baselines"].float().numpy(), pa.float32())
    else:
        columns["reward_baseline"] = pa.nulls(num_rows, pa.float32())
    columns["valid"] = pa.array(tensors["valid"].bool().numpy())
    columns["trained"] = pa.array(np.full(num_rows, trained))
    for key in _NUMBERS:
        columns[key] = pa.array(tensors[key].numpy() if key in tensors else np.zeros(num_rows, np.int64), pa.int64())
    return pa.table(columns)


def _list_array(values: np.ndarray, mask: np.ndarray, dtype: Any) -> Any:
    """What ``values`` [row, token] has where ``mask`` is true, as one list a row."""
    import pyarrow as pa

    offsets = np.concatenate([[0], mask.sum(-1).cumsum()]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[mask].astype(dtype)))


def rows_to_sample(uids: Sequence[str], count: int) -> list[int]:
    """Numbers of ``count`` rows of a batch: whole groups, as long as they fit, and the begin of one where not even one does.

    Groups are chosen by a number made of their prompt's row in the dataset: of two prompts the same one is taken in every
    epoch, so that some prompts can be followed through the run.

    Args:
        uids: of every row of the batch.
    """
    groups: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        groups.setdefault(str(uid), []).append(row)
    chosen: list[int] = []
    for uid in sorted(groups, key=lambda uid: (zlib.crc32(_PLACE_OF_UID.sub("", uid).encode()), uid)):
        if chosen and len(chosen) + len(groups[uid]) > count:
            break
        chosen += groups[uid][:count]
    return chosen
