import gc

import pytest

from burnish.utils import garbage


class Node:
    pass


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()
    gc.enable()


def test_nobody_looks_for_garbage_while_much_is_made_nor_in_it_later(monkeypatch):
    monkeypatch.setattr(garbage, "_MANY", 1000)
    looked = []
    gc.callbacks.append(lambda phase, info: looked.append(phase))
    try:
        with garbage.kept():
            made = [Node() for _ in range(100_000)]
    finally:
        gc.callbacks.pop()
    assert not looked
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(made)
    assert not any(one is made[0] for one in gc.get_objects())


def test_where_little_is_made_all_stays_as_it_was():
    gc.disable()
    with garbage.kept():
        Node()
    assert not gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_raises_leaves_the_search_switched_on():
    with pytest.raises(KeyError), garbage.kept():
        raise KeyError
    assert gc.isenabled()


def test_burnish_check_loads_its_modules_so(monkeypatch):
    from typer.testing import CliRunner

    from burnish.cli import app, check

    states = []
    monkeypatch.setattr(check, "run_check", lambda _: states.append(gc.isenabled()) or 0)
    monkeypatch.setattr(garbage, "kept", lambda original=garbage.kept: states.append("kept") or original())
    CliRunner().invoke(app.app, ["check"])
    assert states == ["kept", True]
