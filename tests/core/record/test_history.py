"""The history of a run: what is put in comes out as rows, columns, files and checkpoints."""

import csv
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exogym.core.base.files import replacing
from exogym.core.record.history import History
from exogym.core.record.rows import COLUMNS, Rows
from exogym.core.record.schema import row_of
from exogym.errors import ArgumentError, ExoGymError

NAN = float("nan")


def add(history: History, steps: Any, losses: Any, nodes: Any = None, **changes: Any) -> None:
    """Add a stretch in which every node has the given losses; by default node ids count from 0."""
    losses = np.asarray(losses, np.float32)
    given: dict[str, Any] = dict(
        steps=steps, epochs=[0] * len(steps), losses=losses, lr=[0.1] * len(steps),
        nodes=range(len(losses)) if nodes is None else nodes, payload_bytes=0.0, tx_bytes=0.0, rx_bytes=0.0,
        final_bytes=(0.0, 0.0, 0.0), wall_s=(0.0, 0.0),
    )  # fmt: skip
    history.add_stretch(**given | changes)


@pytest.fixture
def history() -> History:
    """Three nodes, of which node 1 sits out step 2; an evaluation at the start, after step 2 and of nodes 0 and 2."""
    history = History()
    history.add_evaluation(0, 0, {"val_loss": 9.0})
    add(
        history, [1, 2], [[1.0, 2.0], [3.0, NAN], [5.0, 8.0]], lr=[0.1, 0.2], payload_bytes=10.0, tx_bytes=20.0,
        rx_bytes=30.0, final_bytes=(11.0, 22.0, 33.0), wall_s=(1.0, 3.0),
    )  # fmt: skip
    history.add_evaluation(2, 0, {"val_loss": 4.0, "correlation": 0.5})
    history.add_evaluation(2, 0, {"val_loss": 4.5}, node=2)
    add(history, [3], [[6.0], [7.0], [8.0]], epochs=[1], final_bytes=(12.0, 24.0, 36.0))
    return history


def row(**values: Any) -> dict[str, Any]:
    """Return a row of the fixture's columns in which the rest is missing."""
    return dict.fromkeys((*COLUMNS, "correlation")) | values


def test_every_row_of_a_small_run(history: History) -> None:
    zero = dict(payload_bytes=0.0, tx_bytes=0.0, rx_bytes=0.0)
    one = dict(step=1, epoch=0, payload_bytes=10.0, tx_bytes=20.0, rx_bytes=30.0, lr=0.1, wall_s=2.0)
    two = dict(step=2, epoch=0, payload_bytes=11.0, tx_bytes=22.0, rx_bytes=33.0, lr=0.2, wall_s=3.0)
    three = dict(step=3, epoch=1, payload_bytes=12.0, tx_bytes=24.0, rx_bytes=36.0, lr=0.1, wall_s=0.0)
    assert list(history) == [
        row(step=0, epoch=0, val_loss=9.0, wall_s=0.0, **zero),
        row(**one, train_loss=3.0),
        row(**one, node=0, train_loss=1.0),
        row(**one, node=1, train_loss=3.0),
        row(**one, node=2, train_loss=5.0),
        row(**two, train_loss=5.0, val_loss=4.0, correlation=0.5),
        row(**two, node=0, train_loss=2.0),
        row(**two, node=2, train_loss=8.0, val_loss=4.5),
        row(**three, train_loss=7.0),
        row(**three, node=0, train_loss=6.0),
        row(**three, node=1, train_loss=7.0),
        row(**three, node=2, train_loss=8.0),
    ]
    assert tuple(history[0]) == history.columns == (*COLUMNS, "correlation")


def test_it_is_a_sequence(history: History) -> None:
    rows = list(history)
    assert len(history) == len(rows) == 12
    assert [history[i] for i in range(12)] == rows
    assert [history[i] for i in range(-12, 0)] == rows
    assert history[3:-2:2] == rows[3:-2:2]
    assert history[::-1] == list(reversed(history)) == rows[::-1]
    assert rows[5] in history
    for outside in (12, -13):
        with pytest.raises(IndexError):
            history[outside]
    assert len(History()) == 0
    assert list(History()) == []


def test_rows_of_one_node_and_after_a_step(history: History) -> None:
    rows = list(history)
    for node in (None, 0, 1, 2, 3):
        assert list(history.rows(node)) == [r for r in rows if r["node"] == node]
    assert list(history.rows_after(1)) == [r for r in rows if r["step"] > 1]
    assert list(history.rows_after(2, node=1)) == rows[-2:-1]
    assert list(history.rows_after(3)) == []


@pytest.mark.parametrize("node", [None, 0, 1, 2, 7])
def test_a_column_is_its_rows(history: History, node: int | None) -> None:
    for name in history.columns:
        if name != "node":
            steps, values = history.column(name, node)
            wanted = [(r["step"], r[name]) for r in history.rows(node) if r[name] is not None]
            assert list(zip(steps.tolist(), values.tolist(), strict=True)) == wanted


def test_a_column_needs_no_rows(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is a dict: of 10,000 steps they take a hundred times as long as the column."""
    wanted = {node: [(row["step"], row["train_loss"]) for row in history.rows(node) if row["train_loss"] is not None]
              for node in (None, 1, 7)}  # fmt: skip
    monkeypatch.delattr(Rows, "_rows")
    for node, pairs in wanted.items():
        assert list(zip(*(x.tolist() for x in history.column("train_loss", node)), strict=True)) == pairs


def test_a_misspelt_column(history: History) -> None:
    with pytest.raises(ArgumentError, match="did you mean 'val_loss'"):
        history.column("valloss")


def test_an_evaluation_may_come_before_the_losses_of_its_step() -> None:
    before, after = History(), History()
    before.add_evaluation(2, 0, {"val_loss": 1.0})
    before.add_evaluation(3, 0, {"val_loss": 2.0}, node=1)
    before.add_evaluation(4, 0, {"val_loss": 3.0}, node=5)  # which does not act
    for history in (before, after):
        add(history, [1, 2, 4], np.ones((2, 3)), final_bytes=(1.0, 2.0, 3.0), wall_s=(0.0, 4.0))
    after.add_evaluation(2, 0, {"val_loss": 1.0})
    after.add_evaluation(4, 0, {"val_loss": 3.0}, node=5)
    rows = list(before)
    assert [r["step"] for r in rows] == [1, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4]
    assert [r for r in rows if r["step"] != 3] == list(after)
    assert [before[i] for i in range(len(before))] == rows
    assert [rows[6][name] for name in ("node", "val_loss", "tx_bytes", "wall_s")] == [1, 2.0, 0.0, 3.0]


def test_a_value_given_stands_before_the_stretchs_and_the_newest_stands() -> None:
    history = History()
    add(history, [1], [[1.0]], final_bytes=(5.0, 6.0, 7.0), wall_s=(0.0, 1.0))
    history.add_evaluation(1, 0, {"val_loss": 2.0, "tx_bytes": 8.0})
    history.add_evaluation(1, 0, {"val_loss": 3.0})
    assert [history[0][name] for name in ("train_loss", "val_loss", "payload_bytes", "tx_bytes")] == [
        1.0,
        3.0,
        5.0,
        8.0,
    ]
    assert history.column("tx_bytes")[1].tolist() == [8.0]
    assert history[1]["tx_bytes"] == 8.0  # bytes are of the step: a final synchronisation shows in every row
    history.add_evaluation(5, 0, {"val_loss": 4.0})  # at a step that was not logged: what is known so far
    assert [history[-1][name] for name in ("train_loss", "lr", "tx_bytes", "wall_s")] == [None, None, 6.0, 1.0]


def test_thinned_stretches_keep_bytes_and_seconds_where_they_belong() -> None:
    history = History()
    bytes_before = dict(payload_bytes=1.0, tx_bytes=2.0, rx_bytes=3.0)
    add(history, [4], [[1.0]], span=(1, 8), **bytes_before, final_bytes=(9.0, 9.0, 9.0), wall_s=(0.0, 8.0))
    assert (history[0]["tx_bytes"], history[0]["wall_s"]) == (2.0, 4.0)
    add(history, [], np.empty((1, 0)))  # of a stretch that is not told, nothing is learnt
    add(history, [], np.empty((1, 0)), span=(9, 10), final_bytes=(10.0, 10.0, 10.0), wall_s=(8.0, 9.0))
    assert len(history) == 2
    history.add_evaluation(10, 0, {"val_loss": 0.0})
    assert (history[-1]["tx_bytes"], history[-1]["wall_s"]) == (10.0, 9.0)


def test_the_mean_is_taken_in_float64_over_nodes_that_acted() -> None:
    losses = np.full((3, 2), 1e8, np.float32)
    losses[1, 0], losses[:, 1] = 1.0, NAN
    history = History()
    add(history, [1, 2], losses)
    assert history[0]["train_loss"] == (2e8 + 1) / 3
    assert [(r["step"], r["node"], r["train_loss"]) for r in history][-1] == (2, None, None)


def test_nodes_in_any_order_and_a_copy_is_kept() -> None:
    history, losses = History(), np.array([[7.0], [2.0]], np.float32)
    add(history, [1], losses, nodes=[7, 2])
    losses[:] = 0
    assert [(r["node"], r["train_loss"]) for r in history] == [(None, 4.5), (2, 2.0), (7, 7.0)]


@pytest.mark.parametrize(
    ("steps", "losses", "changes", "message"),
    [
        ([3, 4], [[1, 1]], {}, "after step 3"),
        ([5, 5], [[1, 1]], {}, "ascend"),
        ([5, 9], [[1, 1]], {"span": (5, 8)}, "ascend"),
        ([5], [[1], [1]], {"nodes": [4]}, "do not fit 1 nodes"),
        ([5], [[1]], {"lr": [0.1, 0.2]}, "do not fit"),
    ],
)
def test_a_stretch_that_does_not_fit(steps: Any, losses: Any, changes: Any, message: str, history: History) -> None:
    rows = list(history)
    with pytest.raises(ArgumentError, match=message):
        add(history, steps, losses, **changes)
    assert list(history) == rows


def test_values_become_plain_numbers() -> None:
    history = History()
    history.add_evaluation(
        0, 0, {"val_loss": torch.tensor(0.5), "a": np.float32(0.25), "b": np.array([3]), "c": "text", "d": True}
    )
    found = [history[0][name] for name in ("val_loss", "a", "b", "c", "d")]
    assert found == [0.5, 0.25, 3, "text", True]
    assert [type(value) for value in found] == [float, float, int, str, bool]
    assert history.column("c")[1].tolist() == ["text"]
    for wrong in (torch.zeros(2), [1.0], {"x": 1}):
        with pytest.raises(ArgumentError, match="a single number"):
            history.add_evaluation(0, 0, {"e": wrong})
    with pytest.raises(ArgumentError, match="pass them as arguments"):
        history.add_evaluation(0, 0, {"node": 1})
    assert "e" not in history.columns


def test_csv_holds_every_row(history: History, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h.csv"
    history.to_csv(path)
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == history.columns
    assert rows == [["" if value is None else str(value) for value in r.values()] for r in history]
    assert [p.name for p in path.parent.iterdir()] == ["h.csv"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write("new")
        raise RuntimeError
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


def test_pandas_agrees(history: History) -> None:
    pandas = pytest.importorskip("pandas")
    frame = history.to_pandas()
    assert tuple(frame.columns) == history.columns
    assert frame.node.isna().sum() == 4
    assert frame[frame.node == 2].train_loss.tolist() == [5.0, 8.0, 8.0]
    assert frame.val_accuracy.dtype == float
    assert [None if pandas.isna(x) else x for x in frame.val_loss] == [r["val_loss"] for r in history]
    assert len(History().to_pandas()) == 0


def test_without_pandas(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ExoGymError, match="pip install pandas"):
        history.to_pandas()


def test_a_checkpoint_goes_on_in_the_same_way(history: History) -> None:
    state = history.state()
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    others = json.loads(json.dumps({name: value for name, value in state.items() if name not in arrays}))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
    back = History.from_state(others | {name: value.numpy() for name, value in tensors.items()})
    for one in (history, back):
        with pytest.raises(ArgumentError, match="after step 3"):
            add(one, [3], [[1.0]])
        one.add_evaluation(3, 1, {"late": 1.0})
        one.add_evaluation(5, 1, {"late": 1.5})  # of a step without losses: it has the bytes known so far
        assert one[-1]["tx_bytes"] == 24.0
        add(one, [4, 6], np.ones((4, 2)), wall_s=(5.0, 6.0))
        one.add_evaluation(8, 1, {"late": 2.0}, node=9)
    assert list(back) == list(history)
    assert back.columns == history.columns
    assert back.column("train_loss", 1)[1].tolist() == [3.0, 7.0, 1.0, 1.0]
    with pytest.raises(ArgumentError, match="after step 6"):
        add(back, [6], [[1.0]])
    empty = History.from_state(History().state())
    assert list(empty) == []
    # The state is a copy: what comes later does not change it.
    assert list(History.from_state(state)) == list(History.from_state(others | arrays)) != list(history)


def test_a_thousand_nodes_cost_four_bytes_a_loss() -> None:
    losses, steps = np.ones((1000, 500), np.float32), np.arange(1, 501)
    tracemalloc.start()
    history = History()
    for k in range(4):
        add(history, steps + 500 * k, losses)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(history) == 2000 * 1001
    assert size < 1.1 * 4 * 2_000_000
    assert (history[-1]["step"], history[-1]["node"], history[1_001_000]["node"]) == (2000, 999, None)


# Seeing it


def test_last_is_the_newest_row_of_the_averaged_model(history: History) -> None:
    assert history.last == history.rows(None)[-1] != history[-1]
    assert (history.last["step"], history.last["node"], history.last["train_loss"]) == (3, None, 7.0)
    history.add_evaluation(4, 1, {"val_loss": 1.5}, node=2)  # only of a node
    assert history.last["step"] == 3
    history.add_evaluation(4, 1, {"val_loss": 1.25, "epsilon": 0.5})
    last = history.last
    assert (last["step"], last["val_loss"], last["epsilon"], last["train_loss"]) == (4, 1.25, 0.5, None)
    with pytest.raises(ArgumentError, match="no row of the averaged model yet"):
        History().last  # noqa: B018


def test_a_prompt_shows_how_much_it_holds(history: History) -> None:
    rows = history.rows(None)
    assert f"{len(rows)} rows of {len(history)}, up to step {rows[-1]['step']}" in repr(history)
    assert "0 rows" in repr(History())


def test_plot_draws_the_averaged_model(history: History) -> None:
    pytest.importorskip("matplotlib")
    losses = history.plot()
    (axes,) = losses.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn == {"train_loss": [[1.0, 3.0], [2.0, 5.0], [3.0, 7.0]], "val_loss": [[0.0, 9.0], [2.0, 4.0]]}
    assert losses._repr_png_().startswith(b"\x89PNG")
    above, below = history.plot("val_loss", "correlation", against="tx_bytes").axes
    assert above.lines[0].get_xdata().tolist() == [0.0, 22.0] and below.get_xlabel() == "tx_bytes"
    for wrong, message in ((("val_los",), "did you mean 'val_loss'"), (("val_accuracy",), "contains no value")):
        with pytest.raises(ArgumentError, match=message):
            history.plot(*wrong)
    history.add_evaluation(3, 0, {"note": "text"})
    with pytest.raises(ArgumentError, match="'note' contains text"):
        history.plot("note")
    with pytest.raises(ArgumentError, match="no loss to draw"):
        History().plot()


def test_without_matplotlib(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ExoGymError, match=r"matplotlib is not installed.*exogym\[demo\]"):
        history.plot()


def test_a_name_with_half_a_character_is_written_out_and_its_record_can_be_read() -> None:
    history, name = History(), "l\udce9"  # as of a file's name that is no UTF-8
    history.add_evaluation(1, 0, {name: 1.0, "said": name})
    (row,) = history
    line = (json.dumps(row) + "\n").encode()
    assert row_of(line) == row and row["l\\udce9"] == 1.0 and row["said"] == "l\\udce9"
