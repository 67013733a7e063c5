"""The report: what the page says, worked out by hand, and that nothing of the user's
gets into its markup.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.analysis.report import write_report
from ray_adascale.recipe import Repeat

from ..samples_of import probes, recipe, row, write_rows

NASTY = "<script>alert('$x_{$')</script>&amp;"


def base_rows(count: int = 20) -> list[dict[str, Any]]:
    return [
        row(
            s,
            gain=1.0,
            scale=1.0,
            effective_steps=float(s),
            progress=float(s),
            efficiency=1.0,
            world_size=1,
        )
        | ({"accuracy": 0.04 * s} if s % 5 == 0 else {})
        | {"sigma2": float("nan"), "mu2": float("nan")}
        for s in range(1, count + 1)
    ]


class Page(HTMLParser):
    """Tables as lists of rows of cell texts, tags seen, and everything that could be
    loaded.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.headings: list[str] = []
        self.ids: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == [], "unclosed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self._open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)
            assert not name.startswith("on")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "h2":
            self.headings.append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self._open or "th" in self._open:
            self.tables[-1][-1][-1] += data
        elif self._open[-1:] == ["h2"]:
            self.headings[-1] += data


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Page]:
    def run(*runs: Any, **kwargs: Any) -> Page:
        return Page(
            write_report(
                runs[0] if len(runs) == 1 else list(runs),
                tmp_path / "out" / "report.html",
                **kwargs,
            )
        )

    return run


def test_page_says_what_the_runs_did(make: Callable[..., Page], tmp_path: Path) -> None:
    base = write_rows(tmp_path / "base", base_rows())
    scaled = write_rows(
        tmp_path / "scaled", [row(s) | {"accuracy": 0.08 * s} for s in range(1, 11)]
    )
    page = make(base, scaled, recipe=recipe([(0, 3, 1)], total_steps=20))
    head, *rows = page.tables[0]
    assert head == [
        *(
            "run",
            "workers",
            "S",
            "steps",
            "examples",
            "epochs",
            "effective steps",
            "mean gain",
            "efficiency",
            "loss, last 5 %",
            "noise scale, whole run",
            "accuracy",
            "optimizer",
            "rule",
        )
    ]
    assert rows == [
        [
            "base",
            "1",
            "1",
            "20",
            "640",
            "",
            "20",
            "1.00",
            "100%",
            "0.05000",
            "",
            "0.8000",
            "",
            "",
        ],
        [
            "scaled",
            "2",
            "4",
            "10",
            "320",
            "",
            "20",
            "2.00",
            "50%",
            "0.1000",
            "24",
            "0.8000",
            "",
            "",
        ],
    ]
    # r falls from 16/7 to 2.04 with these σ², μ² (see test_replay): ⌈20 / 2.1⌉ = 10
    # steps, of one seed 9.5·e^±0.2. The base run is not compared.
    assert page.tables[1][1:] == [["scaled", "4", "10", "7–12", "10", "+0.0%"]]
    assert page.headings == ["Runs", "Forecast and actual", "Plots", "Recipe"]
    assert page.tags.count("figure") == page.tags.count("svg") == 7
    text = (tmp_path / "out" / "report.html").read_text()
    # Beside the plots the runs stand once more, in the colours of the table; there is
    # nothing to say of vertical lines.
    keys = re.findall(
        r'<span class="key" style="background:(#\w{6})"></span>(\w+)', text
    )
    assert keys == [
        ("#3b7dd8", "base"),
        ("#e0702a", "scaled"),
        ("#e0702a", "scaled"),
        *keys[:2],
    ]
    assert (
        text.index("<h2>Plots</h2>")
        < text.index('<div class="legend">')
        < text.index("<figure>")
    )
    assert "Vertical lines" not in text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("mode", "scores", "said"),
    [
        (
            "max",
            (),
            "accuracy 0.8 is 0.3 better than the base run's 0.5 (one run). The spread "
            "of seeds is unknown, so this may be chance: search with --repeats 2, or "
            "repeat the base run.</p>",
        ),
        (
            "min",
            (0.45, 0.55),
            "accuracy 0.8 is worse than the base run's 0.5 ± 0.071 (2 seeds), by 4.2 "
            "times the spread of its seeds. Check first "
            "(docs/guides/reading-the-gain.md):</p> <ul><li>More epochs: 2 times the "
            "examples of the base run. Repeated examples cost what a larger batch "
            "saves: compare with a base run of as many examples (`ray-adascale train "
            "WORKLOAD --recipe FILE --total-examples 320`).</li><li>Nothing unusual: 0 "
            "% of the steps clipped, 0 % skipped; efficiency 50 %.</li></ul>",
        ),
        (
            "max",
            (0.6, 1.1),
            "accuracy 0.8 is as good as the base run's 0.85 ± 0.35 (2 seeds). The "
            "difference is 0.14 times the spread of its seeds.</p>",
        ),
    ],
)
def test_a_run_is_judged_by_the_recipes_score(
    make: Callable[..., Page],
    tmp_path: Path,
    mode: str,
    scores: tuple[float, ...],
    said: str,
) -> None:
    runs = [
        write_rows(
            tmp_path / name,
            [row(s) | {"accuracy": 0.08 * s} for s in range(1, count + 1)],
        )
        for name, count in (("whole", 10), ("early", 9))
    ]
    made = recipe([(0, 3, 1)], total_steps=20)
    repeats = [
        Repeat(seed=i + 7, score=score, noise=[]) for i, score in enumerate(scores)
    ]
    make(
        *runs,
        recipe=replace(made, metric="accuracy", mode=mode, score=0.5, repeats=repeats),
    )
    text = " ".join(
        (tmp_path / "out" / "report.html").read_text().replace("&#39;", "'").split()
    )
    assert re.search(
        rf"<h1>.*</h1> <p><span [^>]*></span>whole: {re.escape(said)}", text
    )
    assert "early: accuracy" not in text


def test_epochs_and_a_base_run_of_as_many_examples(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    """A base run of 20 steps of 8 examples, over 64: 2.5 epochs, and 5 at scale."""
    base = write_rows(tmp_path / "base", base_rows())
    scaled = write_rows(
        tmp_path / "scaled", [row(s) | {"accuracy": 0.05 * s} for s in range(1, 11)]
    )
    long = write_rows(
        tmp_path / "long",
        [each | {"position": 8 * each["step"]} for each in base_rows(40)],
    )
    made = replace(
        recipe([(0, 3, 1)], total_steps=20, base_steps_per_epoch=8.0),
        metric="accuracy",
        mode="max",
        score=0.5,
        repeats=[Repeat(seed=i, score=0.4 + 0.1 * i, noise=[]) for i in (1, 2)],
    )
    page = make(scaled, recipe=made)
    assert dict(zip(*page.tables[0], strict=True))["epochs"] == "5"
    path = tmp_path / "out" / "report.html"
    warning = "scaled: More epochs: 5 epochs, 2.5 in the base run. Repeated"
    assert warning in path.read_text()
    assert "of as many examples (" in path.read_text()
    assert "over examples" not in path.read_text()
    page = make(scaled, long, recipe=made)
    text = path.read_text()
    assert (
        "<p>scaled beside long, a base run of as many examples (320): accuracy 0.5000 "
        "against 1.600.</p>" in text
    )
    assert text.count("<figcaption>accuracy, over examples</figcaption>") == 1
    # One with twice as many is no such run.
    make(scaled, base, recipe=made)
    assert "a base run of as many examples (640)" not in path.read_text()


def test_seeds_of_a_run_have_their_mean_and_spread(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    def run(name: str, end: float, **changed: Any) -> Path:
        rows = [
            row(s, lr=0.1) | {"accuracy": end, "scale": 4.0, **changed}
            for s in range(1, 4)
        ]
        return write_rows(tmp_path / name, rows)

    make(
        run("one", 0.7),
        run("two", 0.8),
        run("other", 0.1, scale=2.0),
        run("adam", 0.1, optimizer="Adam"),
    )
    text = " ".join((tmp_path / "out" / "report.html").read_text().split())
    assert (
        "<p>one, two are alike in S, workers, learning rate, rule, optimizer and "
        "length: accuracy 0.75 ± 0.071," in text
    )
    assert text.count("are alike in") == 1
    # In the table and the legend the two have one color, of which the page says what it
    # means.
    keys = re.findall(
        r'<span class="key" style="background:(#\w{6})"></span>(\w+)', text
    )
    assert keys[0] == ("#3b7dd8", "one")
    assert keys[1] == ("#3b7dd8", "two")
    assert len({color for color, _ in keys}) == 3
    assert text.count("a band of one standard deviation") == 1
    # One run alone has no band.
    make(run("one", 0.7), run("other", 0.1, scale=2.0))
    assert (
        "a band of one standard deviation"
        not in (tmp_path / "out" / "report.html").read_text()
    )


def test_a_base_run_of_another_length_is_no_seed_and_has_no_verdict(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    runs = []
    for name, count in (("base", 20), ("long", 40)):
        rows = base_rows(count)
        rows[0]["total_steps"] = count
        runs.append(write_rows(tmp_path / name, rows))
    made = replace(
        recipe([], total_steps=20, base_steps_per_epoch=8.0),
        metric="accuracy",
        mode="max",
    )
    make(*runs, recipe=made)
    text = (tmp_path / "out" / "report.html").read_text()
    assert "are alike" not in text
    assert "base: accuracy 0.8 is" in text
    assert "long: " not in text


def test_the_untrained_models_metrics_stand_at_the_beginning(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    rows = [row(s) | {"accuracy": 0.9} for s in range(1, 4)]
    rows[0] |= {"optimizer": "SGD", "untrained": {"accuracy": 0.125, "word": "x"}}
    page = make(write_rows(tmp_path / "mine", rows))
    cells = dict(zip(page.tables[0][0], page.tables[0][1], strict=True))
    assert (cells["optimizer"], cells["accuracy"]) == ("SGD", "0.9000")
    assert (
        "mine, untrained: accuracy 0.125."
        in (tmp_path / "out" / "report.html").read_text()
    )


def test_page_stands_alone_in_light_and_dark(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    page = make([write_rows(tmp_path, [row(1), row(2)])])
    text = (tmp_path / "out" / "report.html").read_text()
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import|<script|<link|<iframe", text)
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "#123457" not in text  # the placeholder
    # What a plot refers to (clip paths, markers) is its own: several plots share the
    # page's names.
    used = [name for name in page.ids if re.fullmatch(r"[pm][0-9a-f]{10}", name)]
    assert used
    assert len(used) == len(set(used))


def test_what_users_name_is_text(make: Callable[..., Page], tmp_path: Path) -> None:
    path = write_rows(
        tmp_path, [row(1) | {NASTY: 1.0, "_hidden": 2.0}, row(2) | {NASTY: 1.5}]
    )
    page = make(
        {NASTY: path},
        recipe=recipe([], hyperparameters={"note": NASTY}, workload=NASTY),
    )
    assert "script" not in page.tags
    assert page.tables[0][1][0] == NASTY
    assert NASTY in page.tables[0][0]
    assert "Forecast and actual" not in page.headings  # the recipe has no noise
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 5


def test_restarts_and_resizes_are_marked(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    rows = [
        row(1),
        row(2),
        row(3, attempt=1),
        row(4, attempt=2, world_size=4, scale=8.0),
        row(5, world_size=4),
    ]
    rows[4]["attempt"], rows[4]["scale"] = 2, 8.0
    page = make(
        [write_rows(tmp_path / "mine", rows)],
        recipe=recipe([(0, 3, 1)], total_steps=10),
    )
    assert page.tables[0][1][1:3] == ["2 → 4", "4 → 8"]
    assert page.tables[1][1:] == [
        ["mine", "4", "restarted"],
        ["mine", "6", "resized from 2 workers (S = 4) to 4 workers (S = 8)"],
    ]
    assert page.tables[2][1:] == [["mine", "4 → 8", "", "", "5", "resized"]]
    assert page.tags.count("svg") == 7  # one of them the workers
    text = (tmp_path / "out" / "report.html").read_text()
    assert ">Workers</" in text
    assert "Vertical lines" in text
    assert "<h2>Restarts and resizes</h2>" in text
    assert '<th class="text">what</th>' in text
    # a narrow screen has no heading to go by
    assert text.count('<td data-label="what" class="text">re') == 2


def test_forecast_against_actual(make: Callable[..., Page], tmp_path: Path) -> None:
    done = write_rows(tmp_path / "done", [row(s) for s in range(1, 11)])
    half = write_rows(tmp_path / "half", [row(s) for s in range(1, 6)])
    # r = S: 5 steps, and up to 5·e^0.2 = 6.1
    page = make(done, half, recipe=recipe([(0, 3, 0)], 20))
    assert page.tables[1][1:] == [
        ["done", "4", "5", "5–7", "10", "-50.0%, outside the interval"],
        ["half", "4", "5", "5–7", "5", "not finished: at 50%"],
    ]
    # Of two seeds, r = S and r = 1, so 5 and 20 steps; and nothing of what it can't be
    # asked about.
    rule = write_rows(
        tmp_path / "rule", [row(s, progress=1.5 * s) for s in range(1, 11)]
    )
    lr = write_rows(tmp_path / "lr", [row(s, lr=0.2) for s in range(1, 11)])
    second = [Repeat(seed=1, score=0.5, noise=probes([(0, 0, 2)]))]
    first = make(done, recipe=recipe([(0, 3, 0)], 20, repeats=second)).tables[1][1]
    others = make(done, rule, lr, recipe=recipe([(0, 3, 0)], 20)).tables[1][1:]
    assert (first[0], first[3], first[4]) == ("done", "5–20", "10")
    assert 5 < int(first[2]) < 20
    assert others == [
        ["done", "4", "5", "5–7", "10", "-50.0%, outside the interval"],
        ["rule", "4", "", "", "10", "another rule than AdaScale's"],
        ["lr", "4", "", "", "10", "not this recipe's schedule"],
    ]


def test_a_run_that_changed_its_batch(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    # Nothing but noise: r = S.
    scales = [2.0, 3.0, *[5.5] * 18]
    taken = [8 * sum(scales[:i]) for i in range(1, 21)]
    rows = [
        row(
            i,
            scale=s,
            gain=s,
            effective_steps=sum(scales[:i]),
            progress=sum(scales[:i]),
            position=round(taken[i - 1]),
        )
        for i, s in enumerate(scales, start=1)
    ]
    done = write_rows(tmp_path / "done", rows)
    made = recipe([(0, 1, 0)])
    page = make([done], recipe=made)
    assert page.headings[:2] == ["Runs", "Forecast and actual"]
    assert page.tables[0][1][1:5] == ["2", "2 … 5.5, mean 5.2", "20", "832"]
    assert page.tables[1][1][1:] == [
        "2 … 5.5, mean 5.2",
        "",
        "",
        "20",
        "changed its batch",
    ]
    assert (
        "Scale S, as the run chose it" in (tmp_path / "out" / "report.html").read_text()
    )


def test_means_are_over_steps_where_old_rows_were_left_out(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    # 80 steps at S = 2, of which every tenth is kept, and 20 at S = 4: 2.4 on average,
    # and r̄ = 2. The loss is 0.01 after step 95.
    early = [row(s, scale=2.0, loss=1.0) for s in range(1, 81) if s == 1 or s % 10 == 0]
    late = [row(s, scale=4.0, loss=0.01 if s > 95 else 1.0) for s in range(81, 101)]
    cells = make(write_rows(tmp_path / "long", early + late)).tables[0][1]
    assert cells[2] == "2 … 4, mean 2.4"
    assert (cells[8], cells[9]) == ("83%", "0.01000")


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    ended, stopped = (
        write_rows(tmp_path / name, [row(1)]) for name in ("ended", "stopped")
    )
    again = Page(write_report([stopped, stopped, ended], tmp_path / "r.html"))
    assert [cells[0] for cells in again.tables[0][1:]] == [
        "stopped (1)",
        "stopped (2)",
        "ended",
    ]


def test_what_is_given_in_place_of_a_run_or_a_page(tmp_path: Path) -> None:
    recipe([(0, 3, 1)]).save(tmp_path / "recipe.json")
    (tmp_path / "notes").write_text("a note")
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search.json").write_text("{}")
    run = write_rows(tmp_path / "run", [row(1)])
    for given, page, message in (
        (tmp_path / "recipe.json", "r.html", "recipe.json is not a trace row"),
        (tmp_path / "notes", "r.html", "notes': its trace is empty"),
        (
            tmp_path / "search",
            "r.html",
            "search': a search, whose trials keep no trace",
        ),
        (run, "run", "run': a folder. Name the HTML file"),
    ):
        with pytest.raises(ValueError, match=message):
            write_report(given, tmp_path / page)
    # one, and not a run for each of its letters
    assert write_report(str(run), tmp_path / "r.html").is_file()


def test_no_runs_and_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="none given"):
        write_report([], tmp_path / "r.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"is needed for a .*: pip install matplotlib"):
        write_report([write_rows(tmp_path, [row(1)])], tmp_path / "r.html")


def test_the_noise_scale_is_that_of_the_whole_run(
    make: Callable[..., Page], tmp_path: Path
) -> None:
    # At B0 = 8: three of four effective steps with σ²/μ² = 3, one with 5/2, so 8 · (3·3
    # + 5) / (3·1 + 2).
    rows = [
        row(1, effective_steps=3.0),
        row(2, effective_steps=4.0, sigma2=5.0, mu2=2.0, noise_scale=20.0),
    ]
    assert (
        make(write_rows(tmp_path / "x", rows)).tables[0][1][10] == f"{8 * 14 / 5:.3g}"
    )
    assert make(write_rows(tmp_path / "y", [row(1, mu2=-1.0)])).tables[0][1][10] == ""


def test_skipped_steps_are_told(make: Callable[..., Page], tmp_path: Path) -> None:
    rows = [
        row(1),
        row(2, optimizer_steps=1, skipped=True),
        row(3, optimizer_steps=2, clipped=True),
    ]
    gap = [row(1), row(5)]
    make(
        write_rows(tmp_path / "short", gap),
        write_rows(tmp_path / "bad", rows),
        write_rows(tmp_path / "good", [row(1), row(2)]),
    )
    text = (tmp_path / "out" / "report.html").read_text()
    assert text.count("whose gradients were not finite") == 1
    assert "The trace of short is not whole: steps 2 to 4 are missing." in text
    assert text.count("is not whole") == 1
    assert "bad skipped 1 steps, whose gradients were not finite." in text
    assert "bad clipped 33 % of the steps, at a multiple of the expected norm." in text


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_that_failed_is_reported_with_its_cause(
    make: Callable[..., Page], tmp_path: Path, steps: int
) -> None:
    path = write_rows(tmp_path / "mine", [row(s) for s in range(1, steps + 1)])
    (path / "error.txt").write_text("Worker 1: OSError: no <disk>\n\nTraceback ...\n")
    page = make([path])
    assert [cells[0] for cells in page.tables[0][1:]] == ["mine"] * (steps > 0)
    assert ("Failures" in page.headings, "Plots" in page.headings) == (True, steps > 0)
    text = (tmp_path / "out" / "report.html").read_text()
    assert "mine: Worker 1: OSError: no &lt;disk&gt; (error.txt in the run" in text
    assert "Traceback" not in text
