"""``burnish report``: a run's page, written to a file or served while the run goes on."""

import time
from collections.abc import Sequence

from burnish.report import HOST, open_runs, serve_report, write_report
from burnish.utils import local_paths
from burnish.utils.console import console
from burnish.utils.errors import ConfigError


def run_report(
    paths: Sequence[str], *, out: str | None, serve: bool, port: int, max_mb: float, tokenizer: str | None
) -> int:
    """Writes or serves; returns the exit status.

    Raises:
        ConfigError: a folder is no run's, the file cannot be written, or the port is taken.
    """
    if serve and out is not None:
        raise ConfigError("--serve follows the runs and --out writes one file. Choose one of them.")
    started = time.perf_counter()
    runs = open_runs(paths)
    if serve:
        server = serve_report(runs, port, tokenizer=tokenizer)
        console.print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", soft_wrap=True)
        try:
            server.serve_forever()
        finally:
            server.server_close()
        return 0
    path = local_paths.named("--out", out) if out else runs[0].path / "report.html"
    if path.is_dir():
        raise ConfigError(f"--out={out} is a folder. Name the file, as {path / 'report.html'}.")
    size = write_report(runs, path, most_mb=max_mb, tokenizer=tokenizer)
    seconds = time.perf_counter() - started
    console.print(f"{path} ({size / 1e6:.1f} MB, {seconds:.1f} s). Open it in a browser.", soft_wrap=True)
    return 0
