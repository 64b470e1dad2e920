"""The page in a browser: what it draws, that it needs nothing else, and that no text of a run gets out of its place."""

import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import burnish.report
from burnish.report import open_runs, serve_report, write_report
from burnish.utils.errors import ConfigError
from tests.report.chromium import Chromium, Page
from tests.report.made_runs import made_run

EVIL = """</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">&lt;b&gt; <!-- \u2028 \ud83d ${a} `"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    """Two runs; the second has an entropy that collapses, and texts that try to be markup."""
    folder = tmp_path_factory.mktemp("runs")
    first = made_run(folder / "first")
    second = made_run(
        folder / "second",
        seed=1,
        overrides=("actor_rollout_ref.actor.optim.lr=1e-4",),
        changes={
            "actor/entropy": lambda step: 0.5**step,
            "odd/name </script>": lambda step: float("nan") if step == 3 else 1.0,
        },
    )
    lines = (second / "rollouts" / "12.jsonl").read_text().splitlines()
    row = json.loads(lines[0]) | {"response": EVIL, "prompt": EVIL, "data_source": EVIL, "pred": EVIL}
    (second / "rollouts" / "12.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    with (second / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.8e9, "step": 12, "kind": "warning", "message": EVIL}) + "\n")
    return [first, second]


@pytest.fixture(scope="module")
def html(runs, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("page") / "report.html"
    size = write_report(open_runs([str(run) for run in runs]), out)
    assert size == out.stat().st_size
    return out


@pytest.fixture(scope="module")
def page(html, chromium: Chromium) -> Page:
    page = chromium.open(html.as_uri())
    page.wait("document.querySelector('#browser-detail .tokens')")
    page.wait("document.querySelector('#diff-text')")
    return page


COUNT = "document.getElementById('browser-count').textContent"
TEXT_FILTER, STEP_FILTER, LOW_FILTER = (f"#browser-controls [data-filter={name}]" for name in ("text", "step", "low"))
RUN_CHOICE = "#browser-controls select"


def show(page: Page, section: str) -> None:
    """Scrolls to a section and waits until its first curves are drawn."""
    page.run(f"document.getElementById('{section}').scrollIntoView()")
    page.wait(
        f"""[...document.querySelectorAll("#{section} details[open] .plot, #{section} > div .plot")]
            .slice(0, 2).every((plot) => plot.childElementCount)"""
    )


def test_it_asks_for_nothing_and_complains_of_nothing(page, html):
    for section in ("overview", "curves", "stages", "distributions", "rollouts", "diff"):
        show(page, section)
    assert page.complaints() == []
    assert page.requests() == [html.as_uri()]


def test_texts_of_a_run_stay_texts(page):
    page.fill(TEXT_FILTER, "onerror")
    page.fill(RUN_CHOICE, 1)
    page.wait(f"{COUNT}.startsWith('1 of')")
    page.wait("document.querySelector('#browser-detail pre').textContent.includes('onerror')")
    assert page.texts("#browser-detail [data-plain]") == [EVIL]
    assert page.run("window.hacked === undefined && document.images.length === 0 && document.scripts.length > 3")
    assert any("onerror" in text for text in page.texts("#events td"))
    page.fill(TEXT_FILTER, "")
    page.fill(RUN_CHOICE, 0)
    page.wait(f"{COUNT}.startsWith('192 of 192')")


def test_curves_of_both_runs_are_drawn_in_their_colours(page):
    show(page, "curves")
    lines = "[...document.querySelectorAll('#curves [data-chart=\"critic/score/mean\"] path.line')]"
    assert len(set(page.run(f"{lines}.map((path) => getComputedStyle(path).stroke)"))) == 2
    drawn = page.run(f"{lines}.map((path) => path.getAttribute('d').slice(1).split('L'))")
    assert [len(points) for points in drawn] == [12, 12]
    # 0.3 at the first step and 0.8 at the last: higher is nearer to the top.
    (left, low), (right, high) = (tuple(map(float, drawn[0][place].split(","))) for place in (0, -1))
    assert right > left
    assert high < low


def test_a_picture_of_the_curves_is_not_blank(page):
    show(page, "overview")
    drawn = page.screenshot()
    page.run("document.querySelectorAll('path.line, circle').forEach((line) => (line.style.visibility = 'hidden'))")
    assert page.screenshot() != drawn
    page.run("document.querySelectorAll('path.line, circle').forEach((line) => (line.style.visibility = ''))")
    assert page.screenshot() == drawn


def test_curves_are_found_smoothed_and_zoomed(page):
    show(page, "curves")
    page.fill("#curve-search", "ENTROPY actor")
    assert page.texts("#curve-groups figcaption") == ["actor/entropy"]
    page.wait("document.querySelector('#curve-groups path.line')")
    line = "document.querySelector('#curve-groups path.line:not(.raw)').getAttribute('d')"
    before = page.run(line)
    page.fill("#smoothing", 90)
    assert page.run("document.querySelectorAll('#curve-groups path.raw').length") == 2
    assert page.run(line) != before
    left, top = page.run(
        """(() => {
            const box = document.querySelector("#curve-groups svg").getBoundingClientRect();
            return [box.left, box.top];
        })()"""
    )
    page.mouse("mouseMoved", left + 120, top + 60)
    page.mouse("mousePressed", left + 120, top + 60, buttons=1)
    page.mouse("mouseMoved", left + 240, top + 60, buttons=1)
    page.mouse("mouseReleased", left + 240, top + 60)
    # Where it points to nothing: what moves under it would be read out in later tests.
    page.mouse("mouseMoved", 2, 2)
    page.wait("document.getElementById('zoom-controls').textContent.includes('Whole run')")
    page.fill("#smoothing", 0)
    assert len(page.run(line).split("L")) < 12
    page.click("#zoom-controls button")
    assert page.run(line) == before
    page.fill("#curve-search", "")


def test_the_keyboard_reads_a_curve_out(page):
    show(page, "overview")
    page.run("document.querySelector('#overview [data-chart=\"critic/score/mean\"] svg').focus()")
    page.press("Home")
    assert page.texts("#tip")[0].startswith("step 1")
    page.press("ArrowRight")
    assert page.texts("#tip")[0].startswith("step 2first 0.3")
    page.press("Escape")
    assert page.run("document.getElementById('tip').hidden")


def test_everything_that_acts_can_be_reached_and_has_a_name(page):
    unnamed = """[...document.querySelectorAll("button, select, input, summary, a[href], svg[tabindex]")]
        .filter((element) => !element.textContent.trim() && !element.getAttribute("aria-label") && !element.labels?.length)
        .map((element) => element.outerHTML)"""
    assert page.run(unnamed) == []
    titled = """[...document.querySelectorAll("main > section")]
        .every((section) => document.getElementById(section.getAttribute("aria-labelledby")))"""
    assert page.run(titled)
    assert page.run("document.querySelectorAll('h1').length === 1 && document.documentElement.lang === 'en'")


def test_warnings_say_what_to_try_and_lead_to_their_curves(page):
    card = "#warnings [data-kind=entropy_collapse]"
    assert "What to try" in page.texts(card)[0]
    assert len(page.texts(f"{card} ol code")) >= 3
    page.click(f"{card} button.link")
    assert page.run("document.getElementById('curve-search').value") == "actor/entropy"
    page.fill("#curve-search", "")


def test_the_stages_are_stacked_and_the_bottleneck_is_told(page):
    show(page, "stages")
    heights = page.run(
        "[...document.querySelectorAll('#stages figure rect')].map((rect) => +rect.getAttribute('height'))"
    )
    assert sum(heights) > 1000
    assert page.texts("#stages .legend li") == ["gen", "reward", "update_actor", "other", "testing"]
    assert "update_actor" in page.texts("#bottleneck tbody th")


def test_the_spread_of_scores_and_lengths_is_drawn(page):
    show(page, "distributions")
    titles = page.texts("#distributions figcaption")[:4]
    kinds = ("Training scores", "Training lengths in tokens", "Validation scores", "Validation lengths in tokens")
    assert all(title.startswith(kind) for title, kind in zip(titles, kinds, strict=True))
    page.wait("document.querySelectorAll('#distributions .heat rect').length > 20")


def test_tokens_are_coloured_by_what_is_chosen_and_masked_ones_are_struck_out(page):
    show(page, "rollouts")
    colors = """new Set([...document.querySelectorAll("#browser-detail .token")]
        .map((token) => getComputedStyle(token).backgroundColor)).size"""
    assert page.run(colors) > 5
    modes = page.run("[...document.querySelectorAll('input[name=coloring]')].map((input) => input.value)")
    assert modes == ["rollout_log_probs", "advantages", "gap", "token_level_scores", "loss_mask"]
    page.click("input[value=advantages]")
    assert page.run("document.querySelector('#browser-detail .tokens').dataset.coloring") == "advantages"
    # Of one response all advantages are the same.
    assert page.run(colors) == 1
    assert page.run("document.activeElement.value") == "advantages"
    masked = "getComputedStyle(document.querySelector('#browser-detail .masked')).textDecorationLine"
    assert page.run(masked) == "line-through"
    page.run("document.querySelector('#browser-detail .tokens').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert "advantage" in page.texts("#tip")[0]
    page.click("input[value=rollout_log_probs]")


def test_responses_are_filtered_and_searched(page):
    page.fill(STEP_FILTER, "4")
    page.wait(f"{COUNT}.startsWith('16 of 192')")
    page.fill(LOW_FILTER, "1")
    page.wait(f"!{COUNT}.startsWith('16 of')")
    assert set(page.texts("#browser-list .facts b")) == {"1"}
    page.fill(LOW_FILTER, "")
    page.fill(STEP_FILTER, "")
    page.fill(TEXT_FILTER, "assistant <|end|>")
    page.wait(f"{COUNT}.startsWith('192 of 192')")
    page.fill(TEXT_FILTER, "nothing-like-this")
    page.wait(f"{COUNT}.startsWith('0 of 192')")
    page.fill(TEXT_FILTER, "")
    page.wait(f"{COUNT}.startsWith('192 of 192')")


def test_a_prompt_is_followed_over_the_steps_word_by_word(page, runs):
    show(page, "diff")
    assert [text.split(",")[0] for text in page.texts("#diff [data-side=left] option")] == [
        f"step {step}" for step in (0, 4, 8, 12)
    ]
    assert len(page.texts("#diff-text ins, #diff-text del")) > 1
    prompt = page.texts("#diff-body pre")[0]
    for left_out, step in (("INS", 0), ("DEL", 12)):
        parts = page.run("[...document.getElementById('diff-text').childNodes].map((n) => [n.nodeName, n.textContent])")
        rows = map(json.loads, (runs[0] / "validation" / f"{step}.jsonl").read_text().splitlines())
        response = next(row["response"] for row in rows if row["prompt"] == prompt)
        assert "".join(text for name, text in parts if name != left_out) == response
    # From a response of the browser to its prompt.
    page.click("#browser-detail button", "This prompt over steps")
    page.wait("document.querySelectorAll('#diff [data-side=left] option').length === 16")
    assert any(text.startswith("step 12, response 0") for text in page.texts("#diff option:checked"))


def test_settings_show_their_origin_and_what_differs_between_runs(page):
    page.click("#configuration-controls label", "only what differs between runs")
    rows = page.run(
        """[...document.querySelectorAll("#configuration tbody tr")]
            .map((row) => [...row.children].map((cell) => cell.textContent))"""
    )
    by_key = {row[0]: row[1:] for row in rows}
    assert by_key["actor_rollout_ref.actor.optim.lr"] == ["0.0003", "recipe demo", "0.0001", "command line"]
    assert set(by_key) == {"actor_rollout_ref.actor.optim.lr", "trainer.default_local_dir"}
    page.click("#configuration-controls label", "only what differs between runs")


def common(a: list[str], b: list[str]) -> int:
    """Words of a longest common subsequence."""
    best = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a, 1):
        for j, other in enumerate(b, 1):
            best[i][j] = best[i - 1][j - 1] + 1 if word == other else max(best[i - 1][j], best[i][j - 1])
    return best[-1][-1]


def test_differences_are_shortest_and_give_both_texts_back(chromium):
    source = (Path(burnish.report.__file__).parent / "page" / "diff.js").read_text()
    draws = random.Random(0)
    pairs = [[[draws.choice("abc") for _ in range(draws.randrange(12))] for _ in "ab"] for _ in range(400)]
    found = chromium.open("data:text/html,<html data-ready=true>").run(
        f"(() => {{ {source}; return {json.dumps(pairs)}.map(([a, b]) => compare(a, b)); }})()"
    )
    for (a, b), edits in zip(pairs, found, strict=True):
        assert [word for kind, word in edits if kind != "+"] == a
        assert [word for kind, word in edits if kind != "-"] == b
        assert sum(kind == "=" for kind, _ in edits) == common(a, b)


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_readable_on_a_phone_in_both_schemes(html, chromium, dark):
    page = chromium.open(html.as_uri(), width=390, height=844, phone=True, dark=dark)
    page.wait("document.querySelector('#browser-detail .tokens')")
    assert page.run("document.documentElement.scrollWidth") <= 390
    assert page.run(
        "[...document.querySelectorAll('figure.chart')].every((figure) => figure.getBoundingClientRect().right <= 391)"
    )
    # Of text to the page, by the definition of WCAG 2.
    contrast = """(() => {
        const luminance = (color) => {
            const parts = color.match(/[\\d.]+/g).map((v) => v / 255);
            const [r, g, b] = parts.map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const page = luminance(getComputedStyle(document.body).backgroundColor);
        return ["body", ".hint", ".tile .label", "#contents a", ".badge", ".link"]
            .map((name) => luminance(getComputedStyle(document.querySelector(name)).color))
            .map((text) => (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05));
    })()"""
    assert min(page.run(contrast)) >= 4.5
    assert page.complaints() == []


def test_a_run_with_nothing_in_it_yet_is_a_page_too(tmp_path, chromium):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    write_report(open_runs([str(tmp_path / "run")]), tmp_path / "out" / "report.html")
    page = chromium.open((tmp_path / "out" / "report.html").as_uri())
    assert "There is nothing to judge yet" in page.run("document.getElementById('warnings').textContent")
    assert "trainer.sample_rollouts" in page.run("document.getElementById('rollouts').textContent")
    assert page.complaints() == []


def test_a_run_whose_values_are_not_finite_is_a_page_too(tmp_path, chromium):
    names = ("critic/score/mean", "val-core/a/acc/mean@1", "timing_s/step", "actor/entropy")
    rows = [{"step": step, "actor/lr": step - 2, **dict.fromkeys(names, float("nan"))} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(open_runs([str(tmp_path)]), tmp_path / "report.html")
    page = chromium.open((tmp_path / "report.html").as_uri())
    assert page.complaints() == []
    # What a logarithmic axis cannot show is not just gone.
    page.click("#curves label", "logarithmic")
    page.fill("#curve-search", "actor/lr")
    show(page, "curves")
    page.wait("document.querySelector('#curves .chart .hint')")
    assert page.texts("#curves .chart .hint")[0].startswith("2 of 4 values are not above 0")


def test_the_size_is_kept_and_what_is_left_out_is_said(tmp_path):
    folder = made_run(tmp_path / "run", num_steps=12, num_prompts=8, num_tokens=150)
    full = write_report(open_runs([str(folder)]), tmp_path / "full.html")
    small = write_report(open_runs([str(folder)]), tmp_path / "small.html", most_mb=0.4 * full / 1e6)
    assert small <= 0.4 * full
    assert "responses are in this page" in (tmp_path / "small.html").read_text()
    assert "responses are in this page" not in (tmp_path / "full.html").read_text()
    with pytest.raises(ConfigError, match="--max-mb=0.05: curves and settings"):
        write_report(open_runs([str(folder)]), tmp_path / "none.html", most_mb=0.05)
    assert not (tmp_path / "none.html").exists()


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[Path, str]]:
    folder = made_run(tmp_path / "live", num_steps=4)
    server = serve_report(open_runs([str(folder)]), 0, refresh_s=0.2)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def get(url: str, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_the_server_answers_what_is_new_and_only_to_this_computer(served):
    folder, url = served
    status, body = get(f"{url}/data.json")
    found = json.loads(body)
    assert (status, found["data"]["runs"][0]["steps"][-1]) == (200, 4)
    same = json.loads(get(f"{url}/data.json?version={found['version']}")[1])
    assert (same["version"], set(same)) == (found["version"], {"version", "statuses"})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/score/mean": 0.9}\n')
    assert json.loads(get(f"{url}/data.json?version={found['version']}")[1])["data"]["runs"][0]["steps"][-1] == 5
    assert get(f"{url}/chunk/0/train/2")[0] == 200
    assert [
        get(f"{url}/{path}")[0]
        for path in ("chunk/0/train/99", "chunk/7/train/1", f"chunk/0/train/{'9' * 5000}", "metrics.jsonl")
    ] == [404] * 4
    assert get(f"{url}/chunk/0/../1")[0] == 404
    # Gone since the last look at the folder.
    (folder / "rollouts" / "2.jsonl").unlink()
    assert get(f"{url}/chunk/0/train/2")[0] == 404
    assert get(f"{url}/data.json", Host="evil.example")[0] == 403
    with pytest.raises(ConfigError, match=r"--port=.* cannot be listened at"):
        serve_report([], int(url.rpartition(":")[2]))


def test_an_open_page_follows_a_run_that_goes_on(served, chromium):
    folder, url = served
    page = chromium.open(f"{url}/")
    page.wait("document.querySelector('#browser-detail .tokens')")
    page.run("document.getElementById('curve-search').focus()")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "critic/score/mean": 0.95, "brand/new": 1}\n')
    for suffix in ("tokens.parquet", "jsonl"):
        (folder / "rollouts" / f"5.{suffix}").write_bytes((folder / "rollouts" / f"4.{suffix}").read_bytes())
    page.wait("document.querySelector('#overview .tile .value').textContent === '5'")
    page.wait("document.getElementById('browser-count').textContent.startsWith('80 of 80')")
    assert page.run(
        "[...document.querySelectorAll('summary')].some((summary) => summary.textContent.startsWith('brand'))"
    )
    assert page.run("document.activeElement.id") == "curve-search"
    beat = {"time": time.time(), "step": 5, "total_steps": 9, "stage": "gen", "workers": {"actor/0": {"stage": "gen"}}}
    (folder / "events.jsonl").unlink()
    (folder / "heartbeat.json").write_text(json.dumps(beat))
    page.wait("document.querySelector('#overview .state').textContent === 'running'")
    assert "actor/0" in page.run("document.querySelector('#overview table').textContent")
    assert page.complaints() == []
    assert all(address.startswith(url) for address in page.requests())
