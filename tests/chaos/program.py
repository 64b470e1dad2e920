"""A training run in which something terrible happens: ``program.py '<what>' key=value ...``.

``what`` is JSON: {"do": ..., "step": n, "stage": name} does it when the stage begins; with "after" so many seconds later, from a
thread, while rank 1 stands still: the driver waits for it however fast or busy the machine is. With "call" instead of a stage,
when the checkpoint of that step makes its nth change to the disk. An empty object is a run in which nothing happens. With "sft"
first it is a run of supervised fine-tuning: ``program.py sft '<what>' key=value ...``.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time

from burnish.trainer.loop import TrainingLoop
from burnish.utils import stacks
from burnish.utils.console import console

DISK_CALLS = ("fsync", "replace", "rename", "pwrite", "link", "unlink", "mkdir")


def kill_driver(trainer):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(trainer):
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(trainer):
    """As a terminal sends Ctrl-C: to the whole group."""
    os.killpg(0, signal.SIGINT)


def terminate_group(trainer):
    """As job schedulers and `timeout` do."""
    os.killpg(0, signal.SIGTERM)


def interrupt_twice(trainer):
    """By somebody who does not want to wait."""
    interrupt(trainer)
    # Longer than Ray may take to hear of the first one, and than the second is taken for its echo.
    time.sleep(5.0)
    interrupt(trainer)


def hang_up(trainer):
    """As a shell and the system do when a terminal is closed: one after the other."""
    for _ in range(2):
        os.killpg(0, signal.SIGHUP)
        time.sleep(0.05)


def kill_reward_processes(trainer):
    """Between two batches: a row that is being scored would be lost, and is counted as such."""
    for pid in stacks.descendants(os.getpid()):
        with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
            if "pool_worker" in file.read():
                os.kill(pid, signal.SIGKILL)


def rank_1(trainer):
    """Its process."""
    beats = next(iter(trainer.worker_groups.values())).beats()
    return next(beat.pid for name, beat in beats.items() if name.endswith("rank 1"))


def kill_worker(trainer):
    """Of rank 1, and while it works: the driver waits for it by then."""
    threading.Timer(0.2, os.kill, (rank_1(trainer), signal.SIGKILL)).start()


def freeze_worker(trainer):
    """Rank 1 stops where it is, as on a machine that hangs."""
    os.kill(rank_1(trainer), signal.SIGSTOP)


def while_it_waits(trainer, action, seconds, pid):
    """Rank 1 (``pid``), which stands still, goes on once the driver has had the time to hear what was done."""
    time.sleep(seconds)
    action(trainer)
    time.sleep(2.0)
    # What was done may have ended it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def hang(trainer):
    time.sleep(100_000)


def hang_deaf(trainer):
    """As native code does that never comes back to Python: the main thread hears no signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGVTALRM, signal.SIGALRM})
    time.sleep(100_000)


def fill_disk(trainer):
    """Takes all that is left of the disk on which the run writes."""
    with contextlib.suppress(OSError), open(trainer.checkpoints.root.parent / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


ACTIONS = {
    action.__name__: action
    for action in (
        kill_driver,
        terminate,
        terminate_group,
        interrupt,
        interrupt_twice,
        hang_up,
        kill_reward_processes,
        kill_worker,
        freeze_worker,
        hang,
        hang_deaf,
        fill_disk,
    )
}


def arrange(what):
    """Makes it happen at its time, once in this process."""
    if not what:
        return
    action, done = ACTIONS[what["do"]], []

    def happen(trainer):
        if done:
            return
        done.append(True)
        console.print(f"now: {what}")
        if "after" in what:
            pid = rank_1(trainer)
            os.kill(pid, signal.SIGSTOP)
            # The run may end without the thread.
            threading.Thread(target=while_it_waits, args=(trainer, action, what["after"], pid), daemon=True).start()
        else:
            action(trainer)

    trainers = []
    set_stage = TrainingLoop.__setattr__

    def on_change(self, name, value):
        set_stage(self, name, value)
        if name == "current_stage":
            trainers[:] = [self]
            if "call" not in what and (self.global_steps, value) == (what["step"], what["stage"]):
                happen(self)

    TrainingLoop.__setattr__ = on_change
    if "call" in what:
        counts = []
        for name in DISK_CALLS:
            setattr(os, name, _counted(getattr(os, name), counts, what, trainers, happen))


def _counted(call, counts, what, trainers, happen):
    def counted(*args, **kwargs):
        trainer = trainers[0] if trainers else None
        is_saving = trainer is not None and trainer.current_stage == "save_checkpoint"
        # Once begun, a save may be written in the background of other stages.
        if counts or (is_saving and trainer.global_steps == what["step"]):
            counts.append(call)
            if len(counts) == what["call"]:
                happen(trainer)
        return call(*args, **kwargs)

    return counted


if __name__ == "__main__":
    if sys.argv[1] == "sft":
        del sys.argv[1]
        from burnish.trainer.sft.main import main
    else:
        from burnish.trainer.main_ppo import main
    arrange(json.loads(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
