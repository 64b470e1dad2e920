"""A program that calls a run goes on afterwards as if it had not."""

import os
import random
import signal

import numpy as np
import pytest
import torch

from burnish.config import load_config
from burnish.trainer import main_ppo
from burnish.trainer.generators import generators_kept
from burnish.utils import env


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def test_what_a_block_draws_is_drawn_again_behind_it():
    seed()
    expected = draw()
    seed()
    with pytest.raises(ZeroDivisionError), generators_kept():
        draw()[0] / 0
    assert draw() == expected


def test_a_run_leaves_generators_handlers_threads_and_environment_as_they_were(monkeypatch):
    def live(config, build):
        seed()
        env.set_all({"RANK": "0", "WORLD_SIZE": "1"})
        torch.set_num_threads(threads + 1)
        signal.signal(signal.SIGTERM, lambda *_: None)
        return "summary"

    monkeypatch.setattr(main_ppo, "live", live)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    seed()
    draw()
    expected = draw()
    seed()
    draw()
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    assert main_ppo.TaskRunner().run(load_config(["recipe=demo"])) == "summary"
    assert draw() == expected
    assert torch.get_num_threads() == threads
    assert signal.getsignal(signal.SIGTERM) is handler
    assert os.environ["WORLD_SIZE"] == "8"
    assert "RANK" not in os.environ
