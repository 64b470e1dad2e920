import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from burnish.reward.pool import RewardPool
from burnish.reward.pool_worker import frame
from burnish.reward.reward_process import spawn
from burnish.reward.travel import FileFunction, pack
from burnish.utils.errors import ConfigError, RewardError

FILE = str(Path(__file__).with_name("pool_functions.py"))
act = FileFunction(FILE, "act")


@pytest.fixture(scope="module")
def pool():
    """One pool for the tests that need nothing of their own."""
    with RewardPool(act, num_workers=2, timeout=0.7) as pool:
        yield pool


@pytest.fixture(scope="module")
def async_pool():
    with RewardPool(FileFunction(FILE, "act_async"), num_workers=1, timeout=0.4) as pool:
        yield pool


def row(do="return", **row):
    return {"do": do, **row}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def kinds_and_values(outcomes):
    return [(outcome.kind, outcome.value) for outcome in outcomes]


def test_the_first_row_that_takes_too_long_is_told_at_once(caplog):
    with RewardPool(act, num_workers=1, timeout=0.1) as pool:
        assert {outcome.kind for outcome in pool.score([row("sleep", seconds=1e9)] * 2)} == {"timeout"}
    assert [record.getMessage() for record in caplog.records] == [
        f"The reward function act of {FILE} was given up on a response. TimeoutError: it took longer than reward.timeout=0.1 "
        "seconds and was stopped. Further ones are counted."
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone is told whom to end first.")
def test_where_memory_runs_out_a_reward_process_goes_before_its_driver(pool):
    mine = int(Path("/proc/self/oom_score_adj").read_text())
    (outcome,) = pool.score([row("out of memory score")])
    assert outcome.value == max(mine, 500)


def test_to_wait_for_a_row_within_its_own_limit_is_no_hang(monkeypatch):
    sign = threading.Event()
    monkeypatch.setattr("burnish.reward.supervisor.progress", SimpleNamespace(tick=sign.set))
    with RewardPool(act, num_workers=1, timeout=600.0) as pool:
        pool.submit("slow", row("sleep", seconds=1000))
        assert sign.wait(60)


def test_outcomes_come_in_the_order_of_rows_though_rows_end_in_another(pool):
    outcomes = pool.score([row("sleep", seconds=0.2, value=0), row(value=1), row("sleep", seconds=0.1, value=2)])
    assert kinds_and_values(outcomes) == [("returned", 0), ("returned", 1), ("returned", 2)]
    assert 0.2 <= outcomes[0].seconds < 0.6
    assert pool.score([]) == []


@pytest.mark.parametrize("hang", ["sleep", "regex"])
def test_a_row_that_hangs_is_stopped_and_the_others_keep_their_scores(pool, hang):
    rows = [row(value=i) for i in range(8)]
    rows[2] = row(hang, seconds=1e9)
    begun = time.monotonic()
    outcomes = pool.score(rows)
    assert time.monotonic() - begun < 3
    assert outcomes[2].kind == "timeout"
    assert outcomes[2].error.startswith("TimeoutError: it took longer than reward.timeout=0.7 seconds")
    assert [outcome.value for outcome in outcomes] == [0, 1, None, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("do", "kind", "error"),
    [
        ("raise", "raised", "ValueError: no 5"),
        ("exit", "raised", "SystemExit: 3"),
        ("unpicklable", "raised", "what the reward function returned cannot be sent back"),
        ("_exit", "died", "its reward process ended with status 3"),
        ("segfault", "died", "its reward process was ended by SIGSEGV"),
        ("cuda", "raised", r"No CUDA GPUs are available \(''\).*reward.reward_model.enable=true, or behind HTTP"),
    ],
)
def test_a_row_that_fails_says_how_and_costs_no_other(pool, do, kind, error):
    before, failed, after = pool.score([row(value=1), row(do, value=5), row(value=2)])
    assert (before.value, after.value) == (1, 2)
    assert failed.kind == kind
    assert "\n" not in failed.error
    with pytest.raises(RewardError, match=error):
        raise RewardError(failed.error)
    assert ("Traceback" in failed.traceback) == (kind == "raised")


def test_a_row_that_cannot_be_sent_is_an_error_of_that_row(pool):
    bad, good = pool.score([row(value=threading.Lock()), row(value=1)])
    assert bad.kind == "raised"
    assert "cannot be sent to a process" in bad.error
    assert good.value == 1


def test_what_a_function_prints_is_shown_and_disturbs_nothing(pool, capfd):
    assert pool.score([row("print", value=7)])[0].value == 7
    with RewardPool(act, num_workers=1) as own:
        assert own.score([row("print", value=8)])[0].value == 8
    said = capfd.readouterr()
    assert "said 8" in said.out
    assert "complained 8" in said.err


def test_a_function_that_forks_answers_once(pool):
    assert kinds_and_values(pool.score([row("fork", value=1), row(value=2)])) == [("returned", 1), ("returned", 2)]
    assert pool.score([row(value=3)])[0].value == 3


def test_reward_processes_load_neither_torch_nor_transformers_and_are_not_forked(pool):
    modules, pid = (outcome.value for outcome in pool.score([row("modules"), row("pid")]))
    assert not {"torch", "transformers", "ray", "pytest", "numpy"} & set(modules)
    assert os.getpgid(pid) == os.getsid(pid) == pid


def test_a_timeout_ends_what_the_function_started_also_in_a_session_of_its_own(pool, tmp_path):
    note = tmp_path / "pids"
    assert pool.score([row("hang with a child", seconds=1000, value=str(note))])[0].kind == "timeout"
    pids = list(map(int, note.read_text().split()))
    assert len(pids) == 2
    wait_until(lambda: not any(map(alive, pids)))


def test_closing_leaves_no_process_and_no_zombie_and_can_be_repeated():
    pool = RewardPool(act, num_workers=2)
    children = pool.score([row("leave a child", seconds=1000)])[0].value
    pids = {outcome.value for outcome in pool.score([row("pid")] * 50)}
    assert pids
    pool.close()
    pool.close()
    wait_until(lambda: not any(map(alive, children)))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(RewardError, match="The reward pool is closed"):
        pool.submit("a", row())


def test_closing_wakes_one_who_waits():
    pool = RewardPool(act, num_workers=1)
    pool.submit("a", row("sleep", seconds=1000))
    threading.Timer(0.3, pool.close).start()
    with pytest.raises(RewardError, match="The reward pool is closed"):
        pool.collect(["a"])


DRIVER = """
import sys, time
from burnish.reward.pool import RewardPool
from burnish.reward.travel import FileFunction
pool = RewardPool(FileFunction({file!r}, "act"), num_workers=1)
print(pool.score([{{"do": "pid"}}])[0].value, *pool.score([{{"do": "leave a child", "seconds": 1000}}])[0].value, flush=True)
pool.submit("busy", {{"do": "regex"}})
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "its_children_first", [False, True], ids=["alone", "after its children, as Ray kills a worker"]
)
def test_nothing_outlives_a_driver_that_is_killed(its_children_first):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER.format(file=FILE)], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, driver.stdout.readline().split()))
    assert len(pids) == 3
    assert all(map(alive, pids))
    if its_children_first:
        driver.send_signal(signal.SIGSTOP)
        for children in Path(f"/proc/{driver.pid}/task").glob("*/children"):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not any(map(alive, pids)))


def test_closing_does_not_wait_for_what_was_forked_from_the_driver():
    pool = RewardPool(act, num_workers=1)
    pool.wait_until_ready()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        begun = time.monotonic()
        pool.close()
        assert time.monotonic() - begun < 10
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_pool_that_nobody_holds_any_more_ends():
    pool = RewardPool(act, num_workers=1)
    pid = pool.score([row("pid")])[0].value
    assert alive(pid)
    del pool
    wait_until(lambda: not alive(pid))


def test_functions_run_on_the_main_thread_so_alarms_work():
    with RewardPool(FileFunction(FILE, "with_alarm"), num_workers=1) as pool:
        quick, slow = pool.score([{"value": 0.01}, {"value": 30}])
    assert quick.value == 0.01
    assert (slow.kind, slow.error) == ("raised", "TimeoutError: the alarm rang")


def test_a_function_may_use_processes_of_its_own():
    with RewardPool(FileFunction(FILE, "with_a_pool_of_its_own"), num_workers=1) as pool:
        assert pool.score([{"value": 3}])[0].value == 12


def test_memory_beyond_the_limit_is_an_error_of_the_row():
    with RewardPool(act, num_workers=1, memory_limit_mb=512) as pool:
        large, small = pool.score([row("memory"), row(value=1)])
    assert (large.kind, large.error) == ("raised", "MemoryError")
    assert small.value == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("Scorer", 11), ("AsyncScorer", 21), ("of_lambda", 31), ("of_partial", 1), ("of_closure", 41)],
)
def test_callables_of_a_file_are_loaded_by_each_process(name, value):
    with RewardPool(FileFunction(FILE, name), num_workers=1) as pool:
        assert pool.score([{"value": 1}])[0].value == value


def test_callables_made_here_travel_with_what_they_hold():
    held = {"bonus": [5]}
    loaded = FileFunction(FILE, "Scorer").function
    candidates = {
        "closure": lambda value, **_: value + held["bonus"][0],
        "partial": partial(lambda value, more, **_: value + more, more=5),
        "instance of a class of a file": loaded,
        "function of a file": FileFunction(FILE, "makes").function(5),
    }
    for name, function in candidates.items():
        with RewardPool(function, num_workers=1) as pool:
            assert pool.score([{"value": 1}])[0].value == (11 if "instance" in name else 6), name


def test_what_cannot_travel_is_refused_at_once_with_the_way_out():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to reward processes: .*lock.*reward.num_workers=0"):
        RewardPool(lambda **_: lock, num_workers=1)


@pytest.mark.parametrize(("text", "what"), [("import nothing_such", "nothing_such"), ("1 / 0", "ZeroDivisionError")])
def test_a_file_that_cannot_be_loaded_stops_at_once(tmp_path, text, what):
    path = tmp_path / "broken.py"
    path.write_text(f"{text}\ndef compute_score(**_):\n    return 1\n")
    with RewardPool(FileFunction(str(path), "compute_score"), num_workers=2) as pool:
        with pytest.raises(RewardError, match=rf"(?s)compute_score of .*broken.py cannot be used.*{what}.*Traceback"):
            pool.wait_until_ready()
        with pytest.raises(RewardError, match=what):
            pool.score([row()])


def test_a_process_that_dies_while_it_loads_is_not_started_again_and_again(tmp_path):
    path = tmp_path / "dies.py"
    path.write_text(f"import os\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\nos._exit(9)\n")
    pool = RewardPool(FileFunction(str(path), "compute_score"), num_workers=1)
    with pytest.raises(RewardError, match="ended with status 9 while it loaded the function"):
        pool.score([row()])
    pool.close()
    assert (tmp_path / "starts").read_text() == "x"


def test_keys_are_the_callers_and_each_outcome_is_given_out_once(pool):
    pool.submit(("uid", 1), row(value=1))
    pool.submit("other", row(value=2))
    with pytest.raises(RewardError, match="computed already; keys must differ"):
        pool.submit("other", row(value=3))
    assert pool.collect(["other"])["other"].value == 2
    assert pool.collect([("uid", 1)])[("uid", 1)].value == 1
    with pytest.raises(RewardError, match="No row was submitted under 'other'"):
        pool.collect(["other"])


def test_threads_may_submit_at_once(pool):
    results = {}

    def work(name):
        results[name] = [outcome.value for outcome in pool.score([row(value=(name, i)) for i in range(50)])]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [(name, i) for i in range(50)] for name in range(4)}


# --- asynchronous functions


def test_asynchronous_rows_run_at_once_in_one_process(async_pool):
    begun = time.monotonic()
    outcomes = async_pool.score([row("sleep", seconds=0.25, value=i) for i in range(40)])
    assert [outcome.value for outcome in outcomes] == list(range(40))
    assert time.monotonic() - begun < 3


def test_an_asynchronous_row_that_takes_too_long_costs_no_other(async_pool):
    pid = async_pool.score([row("pid")])[0].value
    outcomes = async_pool.score([row("sleep", seconds=100), row("sleep", seconds=0.1, value=1), row("raise", value=2)])
    assert [outcome.kind for outcome in outcomes] == ["timeout", "returned", "raised"]
    assert async_pool.score([row("pid")])[0].value == pid  # The process went on.


@pytest.mark.parametrize(("do", "kind"), [("block", "timeout"), ("stubborn", "timeout"), ("_exit", "died")])
def test_an_asynchronous_row_that_takes_its_process_down_is_found_among_the_others(async_pool, do, kind):
    outcomes = async_pool.score([row("sleep", seconds=0.1, value=1), row(do, seconds=1000), row(value=2)])
    assert [outcome.kind for outcome in outcomes] == ["returned", kind, "returned"]
    assert [outcomes[0].value, outcomes[2].value] == [1, 2]


# --- many


def test_each_of_a_thousand_rows_gets_its_own_outcome_whatever_happens():
    rng = random.Random(0)
    rows, wanted = [], []
    for i in range(1000):
        do = rng.choices(["return", "sleep", "raise", "_exit", "hang"], [0.9, 0.08, 0.01, 0.006, 0.004])[0]
        rows.append(
            row("sleep" if do == "hang" else do, seconds=1e6 if do == "hang" else 0.004 * rng.random(), value=i)
        )
        wanted.append({"raise": "raised", "_exit": "died", "hang": "timeout"}.get(do, "returned"))
    with RewardPool(act, num_workers=4, timeout=0.5) as pool:
        outcomes = pool.score(rows)
    assert [outcome.kind for outcome in outcomes] == wanted
    assert set(wanted) == {"returned", "raised", "died", "timeout"}
    for i, outcome in enumerate(outcomes):
        assert outcome.value == (i if wanted[i] == "returned" else None)
        assert outcome.error is None or wanted[i] != "raised" or outcome.error == f"ValueError: no {i}"


def test_a_process_whose_driver_goes_away_in_the_midst_of_a_message_says_nothing(capfd):
    process, ours = spawn()
    ours.setblocking(True)
    ours.sendall(frame({"function": pack(act), "timeout": None, "memory_limit_mb": None, "driver": os.getpid()}))
    assert ours.recv(1)
    ours.close()  # With the rest unread, which the process sees as a reset.
    assert process.wait(30) == 0
    assert capfd.readouterr().err == ""
