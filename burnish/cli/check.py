"""``burnish check``: the arguments of ``burnish train``, and everything that can be known of the run before it starts."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.text import Text

from burnish.cli.doctor import package_findings
from burnish.config import PPOTrainerConfig, SFTTrainerConfig, to_shown_yaml
from burnish.config.cli import parse_train_args
from burnish.config.plan import BatchPlan
from burnish.trainer.preflight.findings import Findings
from burnish.trainer.preflight.memory_check import named_device
from burnish.trainer.preflight.run import preflight
from burnish.utils.console import console
from burnish.utils.errors import ConfigError
from burnish.utils.secrets import redact_text
from burnish.utils.wording import without_endless_words

_AREAS = ("config", "data", "reward", "template", "memory", "time", "disk", "cluster", "versions")
_OPTIONS_HELP = """\
options of this command:
  --json                one line for machines
  --device NAME         plan memory and time for this GPU, as "H100 80GB"
  --sft                 the arguments are those of burnish sft

"""
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def run_check(argv: Sequence[str]) -> int:
    """Checks and reports.

    Args:
        argv: the words after ``burnish check``: those of ``burnish train``, or with ``--sft`` of ``burnish sft``; ``--json`` and
            ``--device NAME``.

    Returns:
        0 where the run can start, 1 where something must be mended.
    """
    words, as_json, device_name = _own_options(argv)
    is_sft = "--sft" in words
    words = [word for word in words if word != "--sft"]
    findings = Findings()
    plan: BatchPlan | None = None
    try:
        args = parse_train_args(words, command="check", own_options=_OPTIONS_HELP)
        device = None if device_name is None else named_device(device_name)
    except ConfigError as error:
        findings.error("config", str(error))
    else:
        arguments = (args.overrides, args.config_name, args.config_path)
        config: PPOTrainerConfig | SFTTrainerConfig | None
        if is_sft:
            from burnish.trainer.sft.preflight import preflight_sft

            _, config = preflight_sft(*arguments, device=device, findings=findings)
        else:
            _, config, plan = preflight(*arguments, device=device, findings=findings)
        if args.cfg and config is not None and not as_json:
            console.print(to_shown_yaml(config), soft_wrap=True)
    for name, problem in package_findings():
        findings.error("versions", f"{name}: {problem}")
    if as_json:
        _print_json(findings)
    else:
        _report(findings, plan)
    return 0 if findings.ok else 1


def _own_options(argv: Sequence[str]) -> tuple[list[str], bool, str | None]:
    """What is left for the parser of training, and this command's own options."""
    words, as_json, device = [], False, None
    rest = iter(argv)
    for word in rest:
        if word == "--json":
            as_json = True
        elif word == "--device" or word.startswith("--device="):
            device = word.partition("=")[2] or next(rest, "")
        else:
            words.append(word)
    return words, as_json, device


def _print_json(findings: Findings) -> None:
    result = {
        "ok": findings.ok,
        "errors": len(findings.of("error")),
        "warnings": len(findings.of("warning")),
        "findings": [asdict(item) | {"message": redact_text(item.message)} for item in findings.items],
        **findings.facts,
    }
    console.print(json.dumps(result, default=str), soft_wrap=True, markup=False, highlight=False)


def _report(findings: Findings, plan: BatchPlan | None) -> None:
    if plan is not None:
        console.print(plan.render(), soft_wrap=True, markup=False)
    for area in _AREAS:
        items = [item for item in findings.items if item.area == area]
        if not items:
            continue
        console.print(Text(area, style="bold"))
        for item in items:
            line = Text(f"  {item.level:<8}", style=_STYLES[item.level])
            line.append(without_endless_words(redact_text(item.message)), style="default")
            console.print(line, soft_wrap=True)
    errors, warnings = len(findings.of("error")), len(findings.of("warning"))
    more = f" ({_count(warnings, 'warning')})" if warnings else ""
    if errors:
        console.print(Text(f"Not ready: {_count(errors, 'error')} to mend{more}.", style="bold red"), soft_wrap=True)
    else:
        console.print(Text(f"Ready to train{more}.", style="bold green"), soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
