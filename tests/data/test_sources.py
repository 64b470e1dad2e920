"""What may be named as data: files, patterns, folders, mixed lists, data sets of the `datasets` library."""

import importlib.util
import json
from pathlib import Path

import pytest

from burnish.config import DataConfig, load_config
from burnish.config.build import to_yaml
from burnish.config.data_names import HubName, hub_name, named_sets
from burnish.config.paths import check_paths
from burnish.data import RLHFDataset, create_rl_dataset, resolve_files
from burnish.data.files import sources_of
from burnish.utils import hub
from burnish.utils.errors import ConfigError, DataError
from tests.render.fake_tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture
def folder(tmp_path):
    for name, prompts in {"a1.jsonl": "xy", "a2.json": "z", "sub/b.csv": "w", "README.md": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        path.write_text("prompt\nw\n" if name.endswith("csv") else "\n".join(lines))
    return tmp_path


def prompts_of(files, **options):
    dataset = RLHFDataset(files, TOKENIZER, DataConfig(), **options)
    return "".join(row["raw_prompt"][0]["content"] for row in dataset)


def test_patterns_folders_and_files_in_one_list(folder):
    assert prompts_of(f"{folder}/a*") == prompts_of(str(folder)) == "xyz"
    assert prompts_of(f"{folder}/**/*.csv") == "w"
    assert prompts_of([f"{folder}/sub", f"{folder}/a[12].*", f"{folder}/a1.jsonl"]) == "wxyzxy"


def test_a_file_whose_name_is_like_a_pattern_is_that_file(tmp_path):
    (tmp_path / "a[1].jsonl").write_text('{"prompt": "x"}')
    assert prompts_of(f"{tmp_path}/a[1].jsonl") == "x"


def test_max_samples_counts_over_all_files_and_reads_no_further(folder):
    (folder / "z.jsonl").write_text("broken")
    files = [str(folder / "a1.jsonl"), str(folder / "z.jsonl")]
    assert prompts_of(files, max_samples=2) == "xy"
    with pytest.raises(DataError, match=r"z.jsonl, row 0"):
        prompts_of(files, max_samples=3)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("openai/gsm8k", HubName("openai/gsm8k", None, None)),
        ("openai/gsm8k:main", HubName("openai/gsm8k", "main", None)),
        ("hf://openai/gsm8k:main:test", HubName("openai/gsm8k", "main", "test")),
        ("openai/gsm8k::test", HubName("openai/gsm8k", None, "test")),
        *(
            (name, None)
            for name in ("train", "./a/b", "/a/b", "~/a", "data/train.parquet", "a/b/c", "s3://a/b", "a/b.csv.gz")
        ),
    ],
)
def test_names_of_the_hub_are_told_from_paths(name, found):
    assert hub_name(name) == found


def test_a_folder_of_that_name_goes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sources_of("org/name") == [HubName("org/name", None, None)]
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/a.jsonl").write_text("")
    assert sources_of("org/name") == [Path("org/name/a.jsonl")]
    with pytest.raises(DataError, match="files are needed here"):
        resolve_files("other/name")


def test_the_paths_of_a_configuration_may_be_all_of_that(folder):
    def config_of(train, val=None):
        (folder / "config.json").write_text("{}")
        arguments = {"actor_rollout_ref.model.path": str(folder), "data.train_files": train, "data.val_files": val}
        return load_config([arguments, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"])

    check_paths(config_of([f"{folder}/a*.jsonl", str(folder / "sub"), "openai/gsm8k:main"]))
    check_paths(config_of(str(folder), {"one": [f"{folder}/a1.jsonl"], "two": f"{folder}/sub"}))
    with pytest.raises(ConfigError, match=r"data.train_files=.*no file matches .*b\*.jsonl"):
        check_paths(config_of(f"{folder}/b*.jsonl"))
    with pytest.raises(ConfigError, match="there is no file .*nowhere.jsonl"):
        check_paths(config_of(str(folder), {"one": f"{folder}/nowhere.jsonl"}))


@pytest.mark.parametrize(
    "override", ["data.val_files={one:[{0}/a1.jsonl],two:{0}/sub}", "data.val_files.one={0}/a1.jsonl"]
)
def test_validation_sets_have_names_on_the_command_line(folder, override):
    override = override.replace("{0}", str(folder))
    config = load_config([f"data.train_files={folder}", override, "actor_rollout_ref.model.path=x"])
    assert isinstance(config.data.val_files, dict)
    dataset = create_rl_dataset(config.data, TOKENIZER, split="val")
    names = [row["validation_set"] for row in dataset]
    assert names == (["one", "one", "two"] if "two" in override else ["one", "one"])
    assert [row["index"] for row in dataset] == list(range(len(names)))


def test_named_sets_are_read_up_to_val_max_samples_each(folder):
    config = DataConfig(val_files={"one": f"{folder}/a1.jsonl", "two": [f"{folder}/a2.json"]}, val_max_samples=1)
    dataset = create_rl_dataset(config, TOKENIZER, split="val")
    assert [row["validation_set"] for row in dataset] == ["one", "two"]
    with pytest.raises(DataError, match=r"data.val_files.two=.*there is no such file"):
        create_rl_dataset(DataConfig(val_files={"one": f"{folder}/a1.jsonl", "two": "no"}), TOKENIZER, split="val")
    assert named_sets(None) == named_sets({}) == {}


def test_named_sets_are_saved_and_loaded_again(tmp_path):
    files = "data.val_files={aime.24:[a.jsonl],x:b.jsonl}"
    config = load_config(["recipe=demo", "actor_rollout_ref.model.path=/m", files])
    assert named_sets(config.data.val_files) == {"aime.24": ["a.jsonl"], "x": ["b.jsonl"]}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config([], config_name="config", config_path=str(tmp_path)).data.val_files == config.data.val_files
    again = load_config(["data.val_files=[c.jsonl]"], config_name="config", config_path=str(tmp_path))
    assert again.data.val_files == ["c.jsonl"]


@pytest.mark.parametrize(("truncation", "kept"), [("error", "67890"), ("drop", "67890"), ("right", "12345")])
def test_no_validation_row_is_left_out_for_its_length(tmp_path, truncation, kept, caplog):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1234567890"}\n{"prompt": "12"}\n')
    config = DataConfig(
        train_files=[str(tmp_path)],
        val_files=[str(tmp_path)],
        max_prompt_length=5,
        filter_overlong_prompts=True,
        truncation=truncation,
    )
    raw = byte_tokenizer(None)
    assert len(create_rl_dataset(config, raw)) == 1
    validation = create_rl_dataset(config, raw, split="val")
    assert [raw.decode(row["input_ids"]) for row in validation] == [kept, "12"]
    assert "nothing is left out of the validation data" in caplog.text
    rows = [{"prompt": "1234567890"}]
    assert len(create_rl_dataset(config, raw, split="val", rows=rows)) == 1


needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")


@needs_datasets
def test_folders_that_the_datasets_library_saved(tmp_path):
    import datasets

    sets = {
        split: datasets.Dataset.from_list([{"prompt": f"{split}{i}", "info": {"a": i}} for i in range(2)])
        for split in ("train", "test")
    }
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "both")
    sets["test"].save_to_disk(tmp_path / "one")
    assert prompts_of(str(tmp_path / "both")) == "train0train1"
    assert prompts_of(str(tmp_path / "both"), key="data.val_files") == "test0test1"
    assert prompts_of(str(tmp_path / "one"), max_samples=1) == "test0"
    datasets.DatasetDict(a=sets["train"], b=sets["test"]).save_to_disk(tmp_path / "odd")
    with pytest.raises(DataError, match="there is no split train; there is: a, b"):
        prompts_of(str(tmp_path / "odd"))
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    for _ in range(2):
        assert len(RLHFDataset(str(tmp_path / "both"), TOKENIZER, config)) == 2


def test_without_the_datasets_library_its_data_sets_name_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"org/name: No file of that name.*pip install 'burnish\[datasets\]'"):
        prompts_of("org/name")


@needs_datasets
@pytest.mark.parametrize("is_out_of_reach", [True, False])
def test_a_hub_that_is_out_of_reach_is_tried_once_and_not_for_a_minute(monkeypatch, is_out_of_reach):
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    def metadata(url, timeout):
        assert "datasets/openai/gsm8k" in url
        if is_out_of_reach:
            raise OSError("Name or service not known")

    seen = []

    def load(name, configuration):
        seen.append(constants.HF_HUB_OFFLINE)
        raise ConnectionError("no")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_state", hub._State())
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match="the data set cannot be loaded: ConnectionError: no"):
        prompts_of("openai/gsm8k")
    assert seen == [is_out_of_reach]
    assert constants.HF_HUB_OFFLINE is False


@needs_datasets
def test_a_data_set_of_the_hub_by_name(monkeypatch):
    import datasets

    asked = []

    def load(name, configuration):
        asked.append((name, configuration))
        rows = {split: datasets.Dataset.from_list([{"prompt": split}]) for split in ("train", "test")}
        return datasets.DatasetDict(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert prompts_of("openai/gsm8k:main") == "train"
    assert prompts_of("openai/gsm8k", key="data.val_files") == "test"
    assert prompts_of("openai/gsm8k:main:test") == "test"
    with pytest.raises(DataError, match=r"no split dev; there is: train, test. Name one, as openai/gsm8k::train"):
        prompts_of("openai/gsm8k::dev")
    assert asked[:2] == [("openai/gsm8k", "main"), ("openai/gsm8k", None)]
