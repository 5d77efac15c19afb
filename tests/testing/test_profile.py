"""Profiles: every op is in them once, what runs inside a span covers it, and what is written is a trace."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from runs import arguments, options, text_file, xtrain

import xtrain as xt
from xtrain import _C
from xtrain import functional as F
from xtrain.errors import ConfigError
from xtrain.profiling import Event, profile, recorder, span
from xtrain.train import ProfileWriter, Trainer

pytestmark = pytest.mark.on_cpu


def names(events) -> list[tuple[str, str]]:
    return [(event.name, event.kind) for event in events]


def check_tree(events: list[Event]) -> None:
    """What is inside an event lies in it, in order, on its thread; in a span it leaves nothing out."""
    for event in events:
        time = event.begin
        for child in event.children:
            assert event.thread == child.thread and time <= child.begin <= child.end <= event.end
            time = child.end
        if event.kind == "span" and event.children:
            edges = [event.begin, *(child.end for child in event.children)]
            assert [child.begin for child in event.children] == edges[:-1] and edges[-1] == event.end
        check_tree(event.children)


def test_ops_and_their_rules() -> None:
    x = xt.ones(4, 8, requires_grad=True)
    with profile() as found, span("mine", number=3):
        y = F.silu(x)
        y.sum().backward()
    (root,) = found.roots
    assert (root.name, root.kind, root.values) == ("mine", "span", {"number": 3})
    ops = [event for event in found.events() if event.kind in ("forward", "backward")]
    assert names(ops) == [("silu", "forward"), ("sum", "forward"), ("sum", "backward"), ("silu", "backward")]
    assert [event.shapes for event in ops] == ["[4,8]", "[4,8]", "[]", "[4,8]"]
    check_tree(found.roots)
    assert found.lost == 0 and len({event.thread for event in found.events()}) == 1


def test_what_is_left_of_a_span_is_the_host() -> None:
    def op(begin: int, end: int, thread: int = 1) -> Event:
        return Event("op", "forward", begin, end, thread)

    outer, inner = Event("outer", "span", 0, 100, 1), Event("inner", "span", 50, 60, 1)
    first, rule, within = op(10, 20), op(20, 30), op(22, 25)
    roots = recorder._tree([within, first, rule, inner, op(5, 95, thread=2), outer, op(200, 201)])
    assert [(event.begin, event.thread) for event in roots] == [(0, 1), (5, 2), (200, 1)]
    edges = [(event.name, event.begin, event.end) for event in outer.children]
    assert edges == [
        ("host", 0, 10), ("op", 10, 20), ("op", 20, 30), ("host", 30, 50), ("inner", 50, 60), ("host", 60, 100),
    ]  # fmt: skip
    assert rule.children == [within] and inner.children == [] and rule.own == 7


def test_nothing_is_recorded_outside() -> None:
    with span("before"):
        xt.ones(3).exp()
    with profile() as found:
        pass
    xt.ones(3).exp()
    assert found.roots == [] and found.trace()["traceEvents"] == []
    with profile() as found:
        xt.ones(3).exp()
    assert ("exp", "forward") in names(found.roots)


def test_one_at_a_time_and_errors_end_it(tmp_path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), profile(path), span("fails"):
        xt.ones(3).exp()
        with pytest.raises(RuntimeError, match="profile: another one is running"):
            profile().start()
        raise ZeroDivisionError
    assert {"fails", "exp"} <= {row["name"] for row in json.loads(path.read_text())["traceEvents"]}
    three = xt.ones(3)
    with profile() as found, pytest.raises(ValueError):
        three.reshape(2)
    assert found.roots == [], "an op that fails is none"
    with pytest.raises(OSError), profile(tmp_path / "no/where.json"):
        pass
    assert _C.spans_start() and _C.spans_stop() == ([], 0)


def test_threads_have_numbers_of_their_own() -> None:
    with profile() as found, span("here"):
        other = threading.Thread(target=lambda: xt.ones(3).exp())
        other.start()
        other.join()
        xt.ones(3).exp()
    ops = [event for event in found.events() if event.name == "exp"]
    assert len({event.thread for event in ops}) == 2 and len(found.roots) >= 2
    check_tree(found.roots)


def test_what_a_rule_runs_is_inside_it() -> None:
    x = xt.ones(3, requires_grad=True)
    with profile() as found:
        xt.checkpoint(lambda value: value.exp().sin(), x).sum().backward()
    check_tree(found.roots)
    rules = [event for event in found.events() if event.kind == "backward" and event.children]
    assert [event for rule in rules for event in rule.children if event.name == "exp"]


def test_long_names_and_shapes_are_cut() -> None:
    class Ä(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy

    Ä.__name__ = Ä.__qualname__ = "Ä" * 60
    x = xt.zeros(*[11] * 2, *[1] * 6, requires_grad=True)
    with profile() as found:
        xt.cat([x, x, x, x, x]).sum()
        Ä.apply(xt.ones(2, requires_grad=True)).sum().backward()
    (cat,) = [event for event in found.events() if event.name == "cat"]
    assert cat.shapes == "[11,11,1,1,1,1,1,1] [11,11,1,1,1,1,1,1] [11,11,1,1,1,1,1,1] ..."
    assert all(len(event.name) < 60 for event in found.events())
    json.dumps(found.trace())


def test_shapes_that_are_recorded_are_whole() -> None:
    """Those that end anywhere in the room of 79 bytes; tensors on meta have no memory."""
    seen = set()
    for digits in itertools.product((1, 8, 16, 17), (1, 8, 16, 17), range(1, 18), (1, 18)):
        sizes = [10 ** (n - 1) for n in digits]
        tensors = [_C.empty((size, 1, 1, 1), device="meta") for size in sizes]
        with profile() as found:
            xt.cat(tensors)
        ((text,), whole) = [one.shapes for one in found.events()], " ".join(f"[{size},1,1,1]" for size in sizes)
        kept = text.removesuffix(" ...")
        assert kept == whole or (kept != text and whole.startswith(kept + " [")), text
        seen |= {len(text)} if kept == text else {len(text), -len(whole)}
    assert max(seen) == 79
    longer = [-length for length in seen if length < 0]
    assert min(longer) == 76, "cut where it would not leave room for the dots of another"


def run(tmp_path, **changes):
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run", **changes)
    writer = ProfileWriter(tmp_path / "trace.json")
    return Trainer(config, quiet=True, callbacks=[writer]).run(), writer


def test_the_trace_of_a_run(tmp_path) -> None:
    """It loads, its events nest on each thread, and what is inside a step covers all of it: by what it is made of, at any speed."""
    _, writer = run(tmp_path, steps=8, eval_every=4, batch_size=4, grad_accum=2)
    rows = [row for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if row["ph"] == "X"]
    for row in rows:
        row["begin"], row["end"] = round(row["ts"] * 1000), round((row["ts"] + row["dur"]) * 1000)
        assert row["begin"] >= 0 and row["end"] >= row["begin"]
    for thread in {(row["pid"], row["tid"]) for row in rows}:
        above: list[dict] = []
        for row in (row for row in rows if (row["pid"], row["tid"]) == thread):  # each before what is inside it
            while above and above[-1]["end"] <= row["begin"] and above[-1]["end"] < row["end"]:
                above.pop()
            assert not above or above[-1]["begin"] <= row["begin"] <= row["end"] <= above[-1]["end"]
            above.append(row)
    steps = [row for row in rows if row["name"] == "step"]
    assert [row["args"]["number"] for row in steps] == [3, 4, 5, 6, 7]
    for step in steps:
        inside = [
            row for row in rows if row is not step and step["begin"] <= row["begin"] and row["end"] <= step["end"]
        ]
        parts = [row["name"] for row in inside if row["cat"] == "span"]
        assert parts == ["data", "forward", "backward", "forward", "backward", "clip", "optimizer"]
        covered, time = 0, step["begin"]
        for row in sorted(inside, key=lambda row: row["begin"]):
            covered += max(0, row["end"] - max(time, row["begin"]))
            time = max(time, row["end"])
        assert covered >= 0.9 * (step["end"] - step["begin"])
        assert {"linear_cross_entropy", "adamw_", "embedding"} <= {row["name"] for row in inside}
        assert {"forward", "backward", "host"} <= {row["cat"] for row in inside}
    assert "evaluate" in {row["name"] for row in rows}
    shapes = {
        row["args"]["shapes"] for row in rows if row["name"] == "linear_cross_entropy" and row["cat"] == "forward"
    }
    assert shapes == {"[64,16] [256,16] [64]", "[32,16] [256,16] [32]"}  # of the validation, and of half a batch
    assert writer.table is not None and "host" in writer.table and "share" in writer.table


@pytest.mark.parametrize(("steps", "recorded"), [(2, [1, 2]), (5, [1, 2, 3, 4, 5]), (6, [2, 3, 4, 5, 6])])
def test_of_a_short_run_the_last_steps_are_recorded(tmp_path, steps, recorded) -> None:
    run(tmp_path, steps=steps)
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [row["args"]["number"] for row in rows if row["name"] == "step"] == recorded


def test_steps_that_are_read_late_are_recorded_as_they_are_made(tmp_path) -> None:
    """As on a GPU, where the host reads log_every steps at a time."""
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=8)
    trainer = Trainer(config, quiet=True, callbacks=[ProfileWriter(tmp_path / "trace.json", steps=3)])
    trainer.stepper.read_every = 8
    trainer.run()
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [row["args"]["number"] for row in rows if row["name"] == "step"] == [3, 4, 5]


def test_a_profile_changes_nothing(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with_it, _ = run(tmp_path / "a", steps=6)
    config = options(text_file(tmp_path / "b/text.txt"), tmp_path / "b/run", steps=6)
    assert Trainer(config, quiet=True).run().loss == with_it.loss


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, capsys) -> None:
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=4)
    Trainer(config, callbacks=[ProfileWriter(tmp_path / "no/trace.json")]).run()
    assert "warning: the profile failed" in capsys.readouterr().out and not recorder._running


def test_the_table() -> None:
    found = profile()
    inner = Event("inner", "forward", 10, 40, 1)
    found.roots = [Event("outer", "span", 0, 100, 1, children=[inner]), Event("inner", "forward", 200, 300, 1)]
    rows = [line.split() for line in found.table().splitlines()[1:]]
    assert rows == [["inner", "forward", "2", "0.000", "65.0%"], ["outer", "span", "1", "0.000", "35.0%"]]
    assert found.table(most=1).splitlines()[-1].split() == ["1", "more", "0.000", "35.0%"]


def test_what_an_event_takes_by_itself() -> None:
    """Without its children, and with their children only once."""
    below = Event("below", "forward", 20, 80, 1)
    inside = Event("inside", "forward", 10, 90, 1, children=[below])
    outer = Event("outer", "forward", 0, 1_234_567, 1, children=[inside])
    assert (outer.own, inside.own, below.own) == (1_234_567 - 80, 20, 60)
    found = profile()
    found.roots = [outer, Event("second", "forward", 1_500_500, 1_500_501, 1)]
    assert [event.name for event in found.events()] == ["outer", "inside", "below", "second"]
    times = {row["name"]: (row["ts"], row["dur"]) for row in found.trace()["traceEvents"] if row["ph"] == "X"}
    assert times["outer"] == (0.0, 1234.567) and times["second"] == (1500.5, 0.001)
    assert times["below"] == (0.02, 0.06), "microseconds"
    found.roots = [Event(f"op{i}", "forward", 0, i + 1, 1) for i in range(3)]
    assert len(found.table(most=3).splitlines()) == 4
    assert found.table(most=2).splitlines()[-1].split() == ["1", "more", "0.000", "16.7%"]


def test_where_a_trace_goes(tmp_path, monkeypatch) -> None:
    """To the target of a link; after an error, too; and it says how many events were lost."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "trace.json")
    stops = _C.spans_stop
    monkeypatch.setattr(_C, "spans_stop", lambda: (stops()[0], 7))
    with pytest.raises(KeyError), profile(tmp_path / "link.json") as found, span("fails"):
        raise KeyError
    content = json.loads((tmp_path / "there" / "trace.json").read_text())
    assert found.lost == content["otherData"]["lost"] == 7 and (tmp_path / "link.json").is_symlink()
    assert "fails" in [row["name"] for row in content["traceEvents"]]


def test_a_span_belongs_to_the_profile_that_it_began_in() -> None:
    late = span("late")
    with profile():
        late.__enter__()
    with profile() as again:
        late.__exit__(None, None, None)
    assert again.roots == []


def test_the_command(tmp_path) -> None:
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=3)
    done = xtrain("train", *arguments(config), f"--profile={tmp_path / 't.json'}")
    assert done.returncode == 0, done.stderr
    assert f"profile {tmp_path / 't.json'}" in done.stdout and "adamw_" in (tmp_path / "t.json").read_text()


def test_the_command_names_no_trace_that_is_not_written(tmp_path) -> None:
    """Its table is shown all the same."""
    config = options(text_file(tmp_path / "text.txt"), tmp_path / "run", steps=3)
    done = xtrain("train", *arguments(config), f"--profile={tmp_path / 'no/t.json'}")
    assert done.returncode == 0 and "warning: the profile failed" in done.stdout + done.stderr
    assert "profile, of which there is no trace\nname " in done.stdout and "perfetto" not in done.stdout


@pytest.mark.parametrize("words", [["--profile"], ["--profile="], ["--profile", "--steps", "3"]])
def test_the_option_needs_a_file(words) -> None:
    from xtrain.cli.train import command

    with pytest.raises(ConfigError, match="--profile must be followed by the name of a file"):
        command(words)


def test_what_ends_behind_a_profile_is_in_none() -> None:
    """A rule that stops the profile which it began in: the next profile begins from none."""

    class Stops(xt.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            found.stop()
            return dy

    y = Stops.apply(xt.ones(2, requires_grad=True)).sum()
    with profile() as found:
        y.backward()
    with profile() as again:
        pass
    assert ("sum", "backward") in names(found.events()) and again.roots == []


def test_arguments_that_are_left_out_have_no_shape() -> None:
    with profile() as found:
        _C.layer_norm(xt.ones(3, 2), None, xt.ones(2))
    assert [event.shapes for event in found.roots if event.name == "layer_norm"] == ["[3,2] [2]"]


def test_all_of_many_ops_are_recorded() -> None:
    x = xt.ones(3)
    with profile() as found:
        for _ in range(3000):
            x.neg()
    assert names(found.roots) == [("neg", "forward")] * 3000 and found.lost == 0


def test_a_profile_ends_by_itself_alone_and_runs_again() -> None:
    other, found = profile(), profile()
    with found:
        other.stop()
        with span("first"):
            xt.ones(3).exp()
    assert [event.name for event in found.roots] == ["first"] and other.roots == []
    with found:
        xt.ones(3).sin()
    assert "first" not in {event.name for event in found.roots}, "what an earlier recording had is gone"


def test_a_trace_begins_at_0_and_names_its_threads() -> None:
    found = profile()
    found.roots = [Event("a", "forward", 5_000, 7_500, 2), Event("b", "forward", 9_000, 9_100, 1)]
    rows = found.trace()["traceEvents"]
    assert [(row["tid"], row["args"]["name"]) for row in rows if row["ph"] == "M"] == [(1, "thread 1"), (2, "thread 2")]
    assert [(row["ts"], row["dur"]) for row in rows if row["ph"] == "X"] == [(0.0, 2.5), (4.0, 0.1)]


def test_events_that_begin_or_end_together_are_inside_the_longer_one() -> None:
    outer, last, first = (Event("", "span", *ends, 1) for ends in ((0, 100), (60, 100), (0, 20)))
    assert recorder._tree([first, last, outer]) == [outer]
    assert [event for event in outer.children if event.kind == "span"] == [first, last]


def test_steps_of_a_profile_are_counted_from_where_a_run_begins(tmp_path) -> None:
    """Also a resumed one; `skip` and `steps` as they are asked for."""
    run(tmp_path, steps=4)
    writer = ProfileWriter(tmp_path / "again.json", steps=2, skip=1)
    more = {"resume": str(tmp_path / "run"), "steps": 9, "extend": True}
    Trainer(more, quiet=True, callbacks=[writer]).run()
    rows = json.loads((tmp_path / "again.json").read_text())["traceEvents"]
    assert [row["args"]["number"] for row in rows if row["name"] == "step"] == [6, 7]
