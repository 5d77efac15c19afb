"""What a notebook shows: a run in one display that is updated, and tensors, modules and runs as HTML."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from runs import options, python, text_file

import xtrain as xt
from xtrain import nn
from xtrain.notebook import curve, html, live
from xtrain.train import Trainer, progress

pytestmark = pytest.mark.on_cpu
NASTY = "<script>alert('&')</script>"


class Shell:
    """As much of an IPython shell with a kernel as is asked for; `shown` has (HTML, text, id, whether updated)."""

    def __init__(self) -> None:
        self.kernel, self.display_pub, self.shown = object(), self, []

    def publish(self, data, metadata, transient, update) -> None:
        self.shown.append((data["text/html"], data["text/plain"], transient["display_id"], update))


@pytest.fixture
def shell(monkeypatch) -> Shell:
    found = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found))
    for name in ("XTRAIN_NOTEBOOK", "DATABRICKS_RUNTIME_VERSION"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def ticks(monkeypatch) -> list[float]:
    """The clock of the displays: the first number is the time."""
    time = [0.0]
    monkeypatch.setattr(live.Live.__init__, "__defaults__", (lambda: time[0],))
    return time


class Checker(HTMLParser):
    """Well-formed, and nothing that runs or is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes) -> None:
        assert tag not in ("script", "link", "img", "iframe", "style", "object", "use", "image"), tag
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("src", "href", "xlink:href"), name
            assert "url(" not in value and (name == "xmlns" or "//" not in value), value
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open.pop() == tag, tag


def train(tmp_path, **changes) -> Trainer:
    trainer = Trainer(options(text_file(tmp_path / "text.txt"), tmp_path / "run", **changes))
    trainer.run()
    return trainer


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_is_one_display_that_is_updated(shell, ticks, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(live, "_OFTEN", 0.0)
    train(tmp_path, steps=6, eval_every=2)
    assert len({name for *_, name, _ in shell.shown}) == 1
    assert [update for *_, update in shell.shown] == [False] + [True] * (len(shell.shown) - 1)
    assert len(shell.shown) >= 6
    last, text = shell.shown[-1][:2]
    assert text.startswith("step 6/6  loss ") and "width:100.0%" in last
    assert "validation" in last and last.count("<polyline") == 2
    for shown, *_ in shell.shown:
        Checker(shown)
        assert len(shown) < 20_000
    lines = capsys.readouterr().out
    assert "step 1/6" not in lines and ": validation " not in lines and "6 steps in" in lines


def test_updates_are_at_most_two_a_second_and_the_last_is_shown(ticks) -> None:
    shown = []
    display = live.Live(100, 0, lambda html, text, update: shown.append((text, update)), lambda: ticks[0])
    for step in range(1, 100):
        ticks[0] = step / 16
        display.update(step, 1.0, f"step {step}")
    assert [text for text, _ in shown] == [f"step {step}" for step in range(1, 100, 8)]
    display.update(100, 1.0, "step 100")
    assert shown[-1] == ("step 100", True)


def test_a_display_that_fails_gives_way_to_lines(shell, tmp_path, capsys, monkeypatch) -> None:
    calls = []

    def fail(**_) -> None:
        calls.append(1)
        raise RuntimeError("the kernel is gone")

    monkeypatch.setattr(shell, "publish", fail)
    train(tmp_path, steps=4, eval_every=2, log_every=1)
    assert len(calls) == 1, "the first that fails is the last"
    lines = capsys.readouterr().out
    assert all(f"step {step}/4  loss" in lines for step in (1, 2, 3, 4)) and "step 2: validation" in lines


def test_each_run_has_a_display_of_its_own(shell) -> None:
    new = live.publisher()
    assert new is not None
    for show in (new(), new()):
        show("<b>", "text", False)
        show("<i>", "text", True)
    ids = [name for _, _, name, _ in shell.shown]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_warnings_are_printed_too(shell, capsys) -> None:
    shows = progress.Progress(5)
    shows.message("warning: the disk is full")
    shows.message("step 2: all is well")
    shows.close()
    assert capsys.readouterr().out == "warning: the disk is full\n"
    assert "all is well" in shell.shown[-1][0]


@pytest.mark.parametrize("name", ["XTRAIN_NOTEBOOK", "DATABRICKS_RUNTIME_VERSION", "kernel", "Spyder", "none", "quiet"])
def test_where_there_is_no_notebook(name, shell, monkeypatch) -> None:
    assert live.publisher() is not None
    if name.isupper():
        monkeypatch.setenv(name, "0")
    elif name == "kernel":  # IPython in a terminal
        shell.kernel = None
    elif name == "Spyder":
        shell.__class__ = type("SpyderShell", (Shell,), {})
    elif name == "none":  # IPython is imported, and does not run
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    else:
        progress.Progress(5, quiet=True).update(1, 1.0, 1.0)
        assert not shell.shown
        return
    assert live.publisher() is None
    progress.Progress(5).update(1, 1.0, 1.0)
    assert not shell.shown


def test_nothing_of_a_notebook_is_imported() -> None:
    code = (
        "import sys, xtrain as xt\nassert not [m for m in sys.modules if m.startswith('xtrain.notebook')]\n"
        "xt.ones(3)._repr_html_()\nfrom xtrain.notebook import live\nassert live.publisher() is None\n"
        "assert not {'IPython', 'ipywidgets', 'matplotlib'} & {*sys.modules}"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# ---- HTML ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [xt.ones(2, 3), xt.zeros(0), xt.full((), 7), xt.zeros(300, 400), nn.Parameter(xt.ones(2).bfloat16())]
)
def test_a_tensor(value) -> None:
    text = value._repr_html_()
    Checker(text)
    assert str(list(value.shape)) in text and value.dtype.name in text and f"{value.nbytes:,} bytes" in text
    assert ("requires gradient" in text) == value.requires_grad and len(text) < 4_000


class Named(nn.Module):
    def __init__(self) -> None:
        self.first = nn.Linear(3, 4)
        self.rows = nn.ModuleList([nn.Linear(4, 4) for _ in range(5)] + [nn.Linear(4, 2)])
        self.weight = nn.Parameter(xt.zeros(7, 2))
        self.first.weight.requires_grad_(False)

    def extra_repr(self) -> str:
        return NASTY


def test_a_module() -> None:
    text = nn.Sequential(Named())._repr_html_()
    Checker(text)
    count = 3 * 4 + 4 + 5 * (16 + 4) + 4 * 2 + 2 + 14
    assert f"{count:,} parameters, {count - 12:,} of them trained, float32, cpu, {4 * count:,} bytes" in text
    assert "[7, 2] float32" in text and "[4, 3] float32, frozen" in text
    assert "<code>0-4</code> 5 x Linear(" in text and "<code>5</code> Linear(" in text
    assert NASTY not in text and "&lt;script&gt;" in text


def test_members_of_one_text_and_other_sizes_take_lines_of_their_own() -> None:
    class Bare(nn.Module):
        def __init__(self, size: int) -> None:
            self.weight = nn.Parameter(xt.zeros(size))

    text = nn.ModuleList([Bare(1), Bare(2)])._repr_html_()
    assert "<code>0</code>" in text and "<code>1</code>" in text and "[1] float32" in text and "[2] float32" in text


def test_a_module_of_many_members_is_cut() -> None:
    text = nn.Sequential(*[nn.Linear(1, n + 1) for n in range(300)])._repr_html_()
    Checker(text)
    assert text.count("<details>") == 100 and "<li>...</li>" in text


def test_a_module_of_many_parameters_is_cut() -> None:
    class Many(xt.nn.Module):
        def __init__(self) -> None:
            for i in range(500):
                setattr(self, f"p{i}", xt.nn.Parameter(xt.zeros(1)))

    text = Many()._repr_html_()
    assert text.count("<code>") == 400 and "<li>...</li>" in text and "500 parameters" in text


def test_a_run(tmp_path) -> None:
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run <b>", steps=6, eval_every=3)
    trainer = Trainer(config, quiet=True)
    assert "step" in trainer._repr_html_()  # before the first step, without a curve
    result = trainer.run()
    result.sample = NASTY
    with open(trainer.directory / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "loss": "a word", "val_loss": [1]}\n')  # of somebody else: no number
    for text in (result._repr_html_(), trainer._repr_html_()):
        Checker(text)
        assert "run &lt;b&gt;" in text and text.count("<polyline") == 2 and len(text) < 6_000
    assert f"{result.loss:.4f}" in result._repr_html_() and "&lt;script&gt;" in result._repr_html_()
    assert "6 of 6" in trainer._repr_html_()


def test_a_long_text_is_cut() -> None:
    text = html.shown("a" * 30_000 + "b" * 30_000)
    assert len(text) < 21_000 and "\n...\n" in text and text.endswith("b</pre>")


# ---- the curve -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 239, 240, 480, 481, 5_000])
def test_a_series_keeps_the_mean_in_few_points(count) -> None:
    values = np.random.default_rng(count).normal(size=count)
    series = curve.Series()
    for step, value in enumerate(values):
        series.add(step, value)
    points = series.points()
    assert min(count, curve.POINTS // 2) <= len(points) <= curve.POINTS
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    if count <= curve.POINTS:
        assert points == [*enumerate(values)]
    assert 0 <= points[0][0] <= points[-1][0] < count
    assert np.isclose(sum(n for *_, n in series._buckets), count)
    assert len({n for *_, n in series._buckets[:-1]}) <= 1, "each has its share"
    assert np.isclose(sum(v for _, v, _ in series._buckets), values.sum())


@pytest.mark.parametrize(
    "line",
    [
        [],
        [(1, 2.0)],
        [(1, 2.0), (2, 2.0)],
        [(1, float("nan")), (2, float("inf"))],
        [(0, 1e-30), (10**9, 1e30)],
        [(1, -5e-324), (2, 0.0)],
    ],
)
def test_a_curve_of_any_values_is_a_picture_inside_its_frame(line) -> None:
    text = curve.svg(line, line, NASTY)
    if not [value for _, value in line if np.isfinite(value)]:
        assert text == ""
        return
    Checker(text)
    assert "nan" not in text and "inf" not in text
    places = re.findall(r'c[xy]="([^"]+)"', text) + re.findall(
        r"[\d.e+-]+,[\d.e+-]+", " ".join(re.findall(r'points="([^"]+)"', text))
    )
    for place in places:
        assert all(0 <= float(number) <= 520 for number in place.split(","))


def test_series_leave_out_what_is_not_finite() -> None:
    series = curve.Series()
    for step, value in enumerate([1.0, float("nan"), float("inf"), 3.0]):
        series.add(step, value)
    assert series.points() == [(0.0, 1.0), (3.0, 3.0)]


def test_curves_of_values_that_are_large() -> None:
    """A run that diverges is shown, too: 0.5 more than 1e17 is 1e17."""
    for line in ([(1, 1e17)], [(1, -1e20), (2, -1e20)], [(1, 1e300), (2, -1e300)]):
        Checker(curve.svg(line))
    assert curve.svg([(1, 1.7e308), (2, -1.7e308)]) == ""


def points_of(text: str) -> list[list[tuple[float, float]]]:
    """Of each line in a picture, in pixels."""
    lines = re.findall(r'points="([^"]+)"', text)
    return [[tuple(map(float, word.split(","))) for word in line.split()] for line in lines]


def test_later_is_right_and_larger_is_up() -> None:
    text = curve.svg([(10, 1.0), (20, 3.0), (40, 2.0)])
    ((a, b, c),) = points_of(text)
    assert a[0] < b[0] < c[0] and np.isclose((c[0] - a[0]) / (b[0] - a[0]), 3, rtol=0.01)
    assert b[1] < c[1] < a[1], "y grows downwards"


def test_the_numbers_beside_a_curve_are_those_of_their_places() -> None:
    text = curve.svg([(10, 1.0), (20, 3.0), (40, 2.0)])
    ((a, b, c),) = points_of(text)
    values = re.findall(r'y="([^"]+)" text-anchor="end">([^<]+)</text><', text)
    steps = re.findall(r'<text x="([^"]+)" y="204" text-anchor="middle">([^<]+)<', text)
    assert len(values) >= 3 and len(steps) >= 3
    for place, value in values:
        assert abs((float(place) - 4 - a[1]) / (b[1] - a[1]) - (float(value) - 1) / 2) < 0.01
    for place, step in steps:
        assert abs((float(place) - a[0]) / (c[0] - a[0]) - (float(step) - 10) / 30) < 0.01


def test_each_line_has_the_colour_of_its_name() -> None:
    text = curve.svg([(1, 1.0), (2, 2.0)], [(1, 3.0), (2, 4.0)])
    lines = re.findall(r'points="([^"]+)" fill="none" stroke="([^"]+)"', text)
    names = dict(re.findall(r'text-anchor="end" fill="([^"]+)">([^<]+)<', text))
    heights = {names[colour]: float(points.split()[0].split(",")[1]) for points, colour in lines}
    assert heights["validation"] < heights["loss"], "the larger values are those of the validation"


def test_marks_are_the_last_ones() -> None:
    text = curve.svg([], [(step, step) for step in range(5_000)])
    assert text.count("<circle") == curve.POINTS and len(text) < 40_000
    assert ">4900<" in text and ">1000<" not in text


def test_equal_members_with_names_have_lines_of_their_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    text = Twice()._repr_html_()
    assert "<code>left</code>" in text and "<code>right</code>" in text and " x Linear" not in text


def test_what_a_module_says_of_its_parameters() -> None:
    """Bytes of their dtype; neighbours of which one is frozen are not equal; names of any text are escaped."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).bfloat16()
    assert "18 parameters, bfloat16, cpu, 36 bytes" in model._repr_html_() and "2 x Linear" in model._repr_html_()
    model[0].weight.requires_grad_(False)
    text = model._repr_html_()
    assert "18 parameters, 9 of them trained" in text and " x Linear" not in text and text.count(", frozen") == 1
    setattr(model, "<b>", nn.Parameter(xt.zeros(1)))
    assert "<code>&lt;b&gt;</code> [1]" in model._repr_html_() and "<b></code>" not in model._repr_html_()


def test_curves_of_one_point_and_units_of_any_text() -> None:
    text = curve.svg([(3, 1.0)], (), 'loss "<&>"')
    assert text.count("<circle") == 1 and "<polyline" not in text
    assert 'aria-label="loss &quot;&lt;&amp;&gt;&quot; by step"' in text
    assert curve.svg([], [(3, 1.0)]).count("<circle") == 1, "marks without a line"


def test_members_are_counted_at_all_depths_together() -> None:
    parts = [nn.Sequential(*[nn.Linear(1, n + m + 1) for n in range(9)]) for m in range(30)]
    assert nn.Sequential(*parts)._repr_html_().count("<details>") == 100


def test_values_that_are_not_known_take_no_line() -> None:
    assert html.run({"loss": 1.5, "sample": None}, "") == f"<div>{html.table([('loss', 1.5)])}</div>"
    half = "z" * 10_000
    assert html.shown(half + "b" + half + "c").count("z") == 19_999, "as much of the end as of the beginning"


def test_a_display_shows_the_last_messages_and_what_is_behind(ticks) -> None:
    shown = []
    display = live.Live(9, 3, lambda html, text, update: shown.append((html, text)), lambda: ticks[0])
    display.message("message 0\nbelow it")
    assert "message 0\nbelow it" in shown[0][0]
    live.Live(0, 0, lambda html, text, update: shown.append((html, text)), lambda: ticks[0]).close()
    assert "width:0.0%" in shown.pop()[0], "a run of no steps"
    assert "width:33.3%" in shown[0][0] and shown[0][1] == "step 3/9"
    for number in range(1, 50):
        display.message(f"message {number}")
    display.update(4, 1.0, NASTY)
    display.close()
    assert [word for word in re.findall(r"message (\d+)", shown[-1][0])] == [str(n) for n in range(38, 50)]
    assert NASTY not in shown[-1][0] and "&lt;script&gt;" in shown[-1][0]


def test_another_value_of_the_variable_means_nothing(shell, monkeypatch) -> None:
    monkeypatch.setenv("XTRAIN_NOTEBOOK", "1")
    assert live.publisher() is not None
