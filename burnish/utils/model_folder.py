"""Which file of a model's folder is where."""

from burnish.utils import local_paths

VERL_MODEL_FILES = "model_world_size_*_rank_*.pt"
_HF_FOLDER = "huggingface"


def is_verl_folder(path: str) -> bool:
    """Whether ``path`` is a role's folder in a checkpoint of verl's FSDP workers: ``.../global_step_N/actor``."""
    folder = local_paths.expanded(path)
    return local_paths.is_dir(folder) and any(folder.glob(VERL_MODEL_FILES))


def config_folder(path: str) -> str:
    """Where a model's configuration and tokenizer lie: in the folder ``path`` itself, or below where verl has written it."""
    below = local_paths.expanded(path) / _HF_FOLDER
    return str(below) if is_verl_folder(path) and (below / "config.json").is_file() else path
