"""The reward model: a sequence classifier with one label, which is only read."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor

from burnish.config import CriticModelConfig
from burnish.config.profiler import ProfilerConfig
from burnish.config.reward_model import RewardModelConfig
from burnish.config.usage import reads, track_section
from burnish.engine import FSDPEngine
from burnish.protocol import DataProto
from burnish.render import load_tokenizer, normalize_messages, render
from burnish.reward.placement import last_tokens
from burnish.rollout.base import max_sequence_length
from burnish.single_controller import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from burnish.utils.errors import ConfigError
from burnish.workers.profiling import ProfiledWorker, profiled
from burnish.workers.updates import perf_metrics

logger = logging.getLogger("burnish.workers")


class RewardModelWorker(ProfiledWorker):
    """One rank of the reward model.

    Args:
        config: the ``reward.reward_model`` section.
        device: "cpu" or "cuda".
        policy_tokenizer: where the policy's tokenizer is, for ``model.input_tokenizer=auto``.
        trust_policy_tokenizer: whether it may run code of its own.
    """

    profile_name = "reward_model"

    def __init__(
        self, config: RewardModelConfig, device: str, policy_tokenizer: str, trust_policy_tokenizer: bool = False
    ) -> None:
        track_section(config, "reward.reward_model")
        self.config = config
        self.device = torch.device(device, self.device_index) if device == "cuda" else torch.device(device)
        self.policy_tokenizer = policy_tokenizer
        self.trust_policy_tokenizer = trust_policy_tokenizer
        self.pass_metrics: dict[str, float] = {}

    def profilers(self) -> dict[str, ProfilerConfig]:
        """See `ProfiledWorker.profilers`."""
        return {"reward_model": self.config.profiler}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model, and the tokenizers where conversations are rendered anew."""
        self.ensure_process_group(self.device.type)
        model, path = self.config.model, self.config.model_path
        assert path is not None, "checked with the configuration"
        self.engine = FSDPEngine(
            CriticModelConfig(
                path=path,
                trust_remote_code=model.trust_remote_code,
                external_lib=model.external_lib,
                override_config=model.override_config,
                fsdp_config=model.fsdp_config,
            ),
            model.fsdp_config,
            None,
            module="reward",
            device=self.device,
        )
        self._register_dispatch_collect_info("reward_model", self.engine.dp_rank, self.engine.speaks)
        self.input_tokenizer = self.tokenizer = None
        if model.input_tokenizer is not None:
            is_auto = model.input_tokenizer == "auto"
            self.input_tokenizer = load_tokenizer(
                self.policy_tokenizer if is_auto else model.input_tokenizer,
                trust_remote_code=self.trust_policy_tokenizer if is_auto else model.trust_remote_code,
            )
            self.tokenizer = load_tokenizer(path, trust_remote_code=bool(model.trust_remote_code))
        hf_config = self.engine.module.model.config
        self.max_length = max_sequence_length(hf_config, self.config.max_length)
        text_config = hf_config.get_text_config()
        self.vocab_size, self.pad_token_id = text_config.vocab_size, getattr(text_config, "pad_token_id", None)
        self.engine.park()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("reward_model"))
    @profiled("reward_model")
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` [batch, response] float32: the score of each conversation, on the last token that the policy sampled.

        It is read off where transformers' classifiers read it: at the last token that is not the model's padding token. A row
        without a token of the policy gets none.

        Args:
            data: ``input_ids`` ``attention_mask`` [batch, sequence], ``responses`` ``response_mask`` [batch, response]; and
                ``raw_prompt``, where conversations are rendered by the model's own template.
        """
        start = time.perf_counter()
        last = last_tokens(data.tensors["response_mask"])
        texts = [self._cut(ids) for ids in self._conversations(data, last)]
        num_cut = sum(is_cut for _, is_cut in texts)
        if num_cut:
            logger.warning(
                "The beginning of %d of %d conversations was cut: the reward model sees %d tokens "
                "(reward.reward_model.max_length).",
                *(num_cut, len(texts), self.max_length),
            )
        rows = _as_rows([self._until_score(ids) for ids, _ in texts])
        if "uid" in data.non_tensor_batch:
            rows.non_tensor_batch["uid"] = data.non_tensor_batch["uid"]
        by_rows = self.config.micro_batch_size_per_gpu is not None and not self.config.use_dynamic_bsz
        cut = (
            {"micro_batch_size": self.config.micro_batch_size_per_gpu}
            if by_rows
            else {"max_token_len": self.config.forward_max_token_len_per_gpu}
        )
        scores = self.engine.infer_batch(rows, outputs=("values",), **cut)["values"][:, 0].float().cpu()
        rm_scores = torch.zeros(data.tensors["response_mask"].shape, dtype=torch.float32)
        places = (last >= 0).nonzero().squeeze(-1)
        rm_scores[places, last[places]] = scores[places]
        self.pass_metrics |= perf_metrics(self.engine, name="reward_model", seconds=time.perf_counter() - start)
        self.engine.park()
        return DataProto.from_dict(tensors={"rm_scores": rm_scores})

    def _conversations(self, data: DataProto, last: Tensor) -> list[list[int]]:
        """The ids that the model is to read, row by row; none where the policy sampled nothing."""
        tensors = data.tensors
        width = tensors["input_ids"].shape[1] - tensors["responses"].shape[1]
        found: list[list[int]] = []
        for row, end in enumerate(last.tolist()):
            if end < 0:
                found.append([])
                continue
            if self.tokenizer is None:
                upto = width + end + 1
                real = tensors["attention_mask"][row, :upto].bool()
                ids = tensors["input_ids"][row, :upto][real].tolist()
                self._check_ids(ids)
                found.append(ids)
                continue
            assert self.input_tokenizer is not None
            answer = self.input_tokenizer.decode(
                tensors["responses"][row, : end + 1].tolist(), skip_special_tokens=True
            )
            prompt = normalize_messages(data.non_tensor_batch["raw_prompt"][row])
            messages = [*prompt, {"role": "assistant", "content": answer}]
            found.append(render(messages, self.tokenizer, add_generation_prompt=False))
        return found

    def _check_ids(self, ids: list[int]) -> None:
        if max(ids) >= self.vocab_size:
            raise ConfigError(
                f"A conversation has the token id {max(ids)}, but the reward model's vocabulary has {self.vocab_size} entries: "
                f"it has another tokenizer than the policy. Leave reward.reward_model.model.input_tokenizer at auto."
            )

    def _cut(self, ids: list[int]) -> tuple[list[int], bool]:
        """The end of what is too long, where the response is; and whether something was cut."""
        if self.max_length is None or len(ids) <= self.max_length:
            return ids, False
        return ids[-self.max_length :], True

    def _until_score(self, ids: list[int]) -> list[int]:
        """Up to the token whose state is scored; later ones have no say in it."""
        end = len(ids)
        while end > 1 and ids[end - 1] == self.pad_token_id:
            end -= 1
        return ids[:end]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_pass_metrics(self) -> dict[str, float]:
        """``perf/*`` of the last pass."""
        metrics, self.pass_metrics = self.pass_metrics, {}
        return metrics

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def config_reads(self) -> frozenset[str]:
        """Configuration keys that this process has read."""
        return reads()


def _as_rows(texts: list[list[int]]) -> DataProto:
    """Texts as a batch whose one response token comes after each: what is computed for that token, a value function's
    output, is read off the state of the text's last token."""
    width = max(map(len, texts), default=0)
    ids = torch.zeros(len(texts), width + 1, dtype=torch.int64)
    mask = torch.zeros(len(texts), width + 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        if text:
            ids[row, width - len(text) : width] = torch.tensor(text)
            mask[row, width - len(text) :] = True
    tensors: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "responses": ids[:, width:],
        "response_mask": mask[:, width:],
    }
    return DataProto.from_dict(tensors=tensors)
