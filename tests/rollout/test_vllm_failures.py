"""The cause of a vLLM failure is found in the log of its processes, and comes with the key that helps."""

import pytest

from burnish.rollout.vllm.failures import cause_in, death, start_failure
from burnish.utils.errors import RolloutError

# As vLLM 0.32 prints it when a model file is cut short, with most frames left out: three processes log an error each.
CUT_FILE = """
(EngineCore pid=10861) INFO 11-28 11:46:45 [core.py:120] Initializing a V1 LLM engine
(Worker pid=10992) ERROR 11-28 11:46:50 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=10992) ERROR 11-28 11:46:50 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=10992) ERROR 11-28 11:46:50 [multiproc_executor.py:953]   File "weight_utils.py", line 1208, in weights_iterator
(Worker pid=10992) ERROR 11-28 11:46:50 [multiproc_executor.py:953]     with safe_open(st_file, framework="pt") as f:
(Worker pid=10992) ERROR 11-28 11:46:50 [multiproc_executor.py:953]          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
(Worker pid=10992) ERROR 11-28 11:46:50 [multiproc_executor.py:953] safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered
(EngineCore pid=10861) ERROR 11-28 11:46:53 [core.py:1510] EngineCore failed to start.
(EngineCore pid=10861) ERROR 11-28 11:46:53 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=10861) ERROR 11-28 11:46:53 [core.py:1510]   File "multiproc_executor.py", line 815, in wait_for_ready
(EngineCore pid=10861) ERROR 11-28 11:46:53 [core.py:1510]     raise e from None
(EngineCore pid=10861) ERROR 11-28 11:46:53 [core.py:1510] Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
  File "process.py", line 314, in _bootstrap
    self.run()
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
""".splitlines()  # noqa: E501

COLOURED = [
    "\x1b[0;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 11-28 11:46:53 [core.py:99] Traceback (most recent call last):",
    '\x1b[0;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 11-28 11:46:53 [core.py:99]   File "x.py", line 1, in f',
    "\x1b[0;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 11-28 11:46:53 [core.py:99] torch.OutOfMemoryError: CUDA out of memory.",
]


def traceback_of(*last: str) -> list[str]:
    return ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    f()", *last]


def test_the_error_that_no_other_one_explains_is_the_cause():
    expected = "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata"
    assert cause_in(CUT_FILE).startswith(expected)


def test_colours_and_process_names_are_no_part_of_it():
    assert cause_in(COLOURED) == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_line_that_only_looks_like_an_error_is_none():
    lines = ["(EngineCore pid=1) INFO 11-28 11:46:53 [a.py:1] ValueError: mentioned in passing", "Note: ImportError"]
    assert cause_in(lines) is None
    assert cause_in([]) is None


def test_of_several_tracebacks_the_last_that_says_something_counts():
    lines = [*traceback_of("ImportError: an optional package"), "...", *traceback_of("KeyError: 'q'"), "...",
             *traceback_of("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."),
             *traceback_of("asyncio.exceptions.CancelledError")]  # fmt: skip
    assert cause_in(lines) == "KeyError: 'q'"


def test_a_message_on_the_lines_behind_its_class_is_taken_in():
    lines = traceback_of(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig:", "  Value error, no"
    )
    assert cause_in(lines).endswith("ModelConfig: Value error, no")


@pytest.mark.parametrize(
    "line", ["Fatal Python error: Segmentation fault", "terminate called after throwing an instance of 'x'"]
)
def test_a_process_that_ends_without_an_exception_leaves_what_the_system_said(line):
    assert cause_in(["INFO loading", f"(EngineCore pid=3) {line}"]) == line


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Error in memory profiling. Initial free memory 90 GiB, current free memory 93 GiB.", "kv_cache_memory_bytes"),
        ("Free memory on device cuda:0 (3/79 GiB) is less than desired GPU memory utilization", "gpu_memory_utilization"),
        ("No available memory for the cache blocks. Try increasing", "gpu_memory_utilization"),
        ("5 GiB KV cache is needed, which is larger than the available KV cache memory", "max_model_len"),
        ("Total number of attention heads (14) must be divisible by tensor parallel size (4).", "tensor_model_parallel_size"),
        ("/lib/vllm/_C.so: undefined symbol: _ZN3c10", "burnish doctor"),
        ("[Errno 28] No space left on device", "/dev/shm"),
    ],
)  # fmt: skip
def test_the_key_that_helps_stands_beside_it(said, key):
    error = start_failure(
        "folder",
        RuntimeError("Engine core initialization failed. See root cause above."),
        traceback_of(f"ValueError: {said}"),
    )
    assert isinstance(error, RolloutError)
    assert str(error).startswith(f"vLLM did not start with 'folder': ValueError: {said.rstrip('.')}. ")
    assert key in str(error)


def test_in_one_process_the_chain_of_errors_is_the_log():
    try:
        try:
            raise ValueError("the model has no such layer")
        except ValueError as inner:
            raise RuntimeError("Engine core initialization failed. See root cause above.") from inner
    except RuntimeError as outer:
        error = start_failure("folder", outer)
    assert str(error) == "vLLM did not start with 'folder': ValueError: the model has no such layer."


def test_an_error_that_says_nothing_is_named_by_its_class():
    assert str(start_failure("folder", AssertionError())) == "vLLM did not start with 'folder': AssertionError."


def test_a_death_tells_how_and_why():
    how = "its process 12 ended with signal SIGKILL"
    assert death(how, COLOURED).startswith(
        f"{how}; the last error in its log is: torch.OutOfMemoryError: CUDA out of memory. Lower"
    )
    assert death(how, []) == f"{how}; its log holds no error"
