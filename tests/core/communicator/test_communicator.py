"""Every collective against plain torch, over rows stored in any order; and the bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from problems import dyadic
from torch import Tensor

from exogym.core.communicator import Communicator, Event, Wire, tree_sum
from exogym.errors import ArgumentError

N = 6
ORDERS = [[0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2]]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def tree(leaves: dict[int, Tensor]) -> Tensor:
    """The sum over ids of a binary tree whose leaves stand at their ids, worked top down."""

    def below(level: int, position: int) -> Tensor | None:
        if level == 0:
            return leaves.get(position)
        left, right = below(level - 1, 2 * position), below(level - 1, 2 * position + 1)
        return right if left is None else left if right is None else left + right

    total = below(max(leaves).bit_length(), 0)
    assert total is not None
    return total


class Rows:
    """A communicator whose rows are stored in `order`, and the way there and back."""

    def __init__(self, order: Sequence[int], present: Sequence[int] | None = None):
        self.comm = Communicator(order, len(order))
        if present is not None:
            self.comm.present = list(present)
        self.order = torch.tensor(order)
        self.events: list[Event] = []
        self.comm.ledger.listeners.append(self.events.append)

    def put(self, by_id: Tensor) -> Tensor:
        return by_id[self.order].clone()

    def back(self, rows: Tensor) -> Tensor:
        return rows[self.order.argsort()]


orders = pytest.mark.parametrize("order", ORDERS)


# The tree


@pytest.mark.parametrize(
    "ids", [[0], [5], [0, 1], [1, 2], [0, 1, 2], [0, 3, 7, 8], [1, 4, 6], list(range(7)), [2, 3, 11, 40]]
)
def test_the_tree_adds_siblings_and_passes_the_lonely_through(ids: list[int]) -> None:
    x = numbers(len(ids), 1000)
    assert torch.equal(tree_sum(x, ids), tree(dict(zip(ids, x, strict=True))))
    if len(ids) > 3:  # the control: another order gives other bits
        assert not torch.equal(tree_sum(x, ids), tree(dict(zip(ids, x.flip(0), strict=True))))


def test_the_tree_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(5, 103)
    for ids in (list(range(5)), [0, 2, 3, 6, 7]):
        whole = tree_sum(x, ids)
        with monkeypatch.context() as m:
            m.setattr("exogym.core.communicator.wire.CHUNK_ELEMENTS", 40)
            assert torch.equal(tree_sum(x, ids), whole)


def test_the_result_does_not_share_memory_with_a_row() -> None:
    x = numbers(1, 4)
    tree_sum(x, [3]).zero_()
    assert x.abs().min() > 0


# Reductions


@orders
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_reduce_of_everyone(order: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, x = Rows(order), numbers(N, *shape, dtype=dtype)
    wide = x.float() if dtype == torch.bfloat16 else x  # half precision is summed in fp32 and rounded once
    total = tree(dict(enumerate(wide.reshape(N, -1)))).reshape(shape)
    expected = {"sum": total.to(dtype), "mean": (total / N).to(dtype), "max": x.amax(0), "min": x.amin(0)}
    for op, value in expected.items():
        given = rows.put(x)
        result = rows.comm.all_reduce(given, op)
        assert result.shape == x.shape and result.dtype == dtype
        assert torch.equal(result, value.expand_as(x)), op
        assert torch.equal(given, rows.put(x))  # not in place
        assert result.stride(0) == 0  # one row, expanded
    assert torch.equal(rows.comm.all_reduce(rows.put(x)), expected["mean"].expand_as(x))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weighted_means_of_half_precision_are_rounded_once(dtype: torch.dtype, native: bool) -> None:
    comm = Communicator(range(N), N, Wire(range(N), native))
    x, weights = numbers(N, 500, dtype=dtype), torch.tensor([1.0, 3.0, 4.0, 5.0, 7.0, 11.0])
    exact = (x.double() * (weights / weights.sum()).double()[:, None]).sum(0)
    unit = exact.abs() * torch.finfo(dtype).eps + 1e-6  # of fp32's sums, where numbers cancel
    assert bool(((comm.all_reduce(x, weights=weights)[0].double() - exact).abs() <= 0.51 * unit).all())
    if not native:  # torch's own mean is a sum, rounded, and then divided
        exact = x.double().mean(0)
        unit = exact.abs() * torch.finfo(dtype).eps + 1e-6
        assert bool(((comm.all_reduce(x)[0].double() - exact).abs() <= 0.51 * unit).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_hundred_weighted_means_have_no_bias(dtype: torch.dtype) -> None:
    """Three shares of a third, each rounded to bf16, add up to 1.002: a fifth too much after a hundred means."""
    comm = Communicator(range(3), 3)

    def growth(mean: Callable[[Tensor], Tensor]) -> float:
        g = torch.Generator().manual_seed(0)
        x = (1 + torch.rand(2000, generator=g)).to(dtype).expand(3, -1)
        start = float(x.double().mean())
        for _ in range(100):  # nodes train a little in between, as much up as down
            x = mean((x.float() + 0.1 * (torch.rand(x.shape, generator=g) - 0.5)).to(dtype))
        return float(x.double().mean()) / start

    assert abs(growth(lambda x: comm.all_reduce(x, weights=torch.ones(3)).clone()) - 1) < 0.005
    third = torch.full((3, 1), 1 / 3).to(dtype)  # the control: weights in half precision
    rounded = growth(lambda x: (x * third).sum(0).expand(3, -1).clone())
    assert abs(rounded - 1) > (0.15 if dtype == torch.bfloat16 else 0.01)


@orders
def test_all_reduce_in_groups(order: list[int]) -> None:
    rows, x = Rows(order), numbers(N, 7)
    groups = [[4, 0, 3], [2, 5]]  # node 1 sits out
    result = rows.back(rows.comm.all_reduce(rows.put(x), "mean", groups=groups))
    for group in ([0, 3, 4], [2, 5]):
        expected = tree({i: x[i] for i in group}) / len(group)
        assert all(torch.equal(result[i], expected) for i in group)
    assert torch.equal(result[1], x[1])
    biggest = rows.back(rows.comm.all_reduce(rows.put(x), "max", groups=groups))
    assert torch.equal(biggest[5], torch.maximum(x[2], x[5]))


@orders
@pytest.mark.parametrize("padded", [False, True])
def test_all_reduce_into_a_tensor(order: list[int], padded: bool) -> None:
    rows, x = Rows(order), numbers(N, 7)
    mine = torch.full((N, 9), 5.0)[:, 1:8] if padded else torch.empty(N, 7)
    mine.copy_(rows.put(x))
    whole = rows.comm.all_reduce(mine, "mean", out=mine)
    assert whole.data_ptr() == mine.data_ptr()
    assert torch.equal(mine, (tree(dict(enumerate(x))) / N).expand_as(x))
    mine.copy_(rows.put(x))
    rows.comm.all_reduce(mine, "sum", groups=[[5, 1], [0, 2]], out=mine)
    pairs = rows.back(mine)
    assert torch.equal(pairs[1], x[1] + x[5]) and torch.equal(pairs[5], pairs[1])
    assert torch.equal(pairs[2], x[0] + x[2]) and torch.equal(pairs[3:5], x[3:5])
    other = torch.zeros(N, 7)
    rows.comm.all_reduce(rows.put(x), "sum", groups=[[5, 1]], out=other)
    assert torch.equal(rows.back(other)[[0, 2, 3, 4]], torch.zeros(4, 7))  # outside the group: as it was


@orders
def test_all_reduce_with_weights(order: list[int]) -> None:
    rows, x = Rows(order), numbers(N, 7, dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.0, 4.0, 5.0, 6.0])
    result = rows.comm.all_reduce(rows.put(x), weights=weights)
    expected = (weights.double()[:, None] * x).sum(0) / 18
    torch.testing.assert_close(result, expected.expand_as(x), rtol=1e-14, atol=1e-15)
    assert torch.equal(rows.comm.all_reduce(rows.put(x), weights=weights * 8), result)  # a constant changes nothing
    thrice = rows.comm.all_reduce(rows.put(x), weights=weights * 3)
    torch.testing.assert_close(thrice, result, rtol=1e-14, atol=1e-15)
    assert (result - x.mean(0)).abs().max() > 1e-4
    grouped = rows.back(rows.comm.all_reduce(rows.put(x), groups=[[0, 1], [3]], weights=weights))
    torch.testing.assert_close(grouped[1], (x[0] + 2 * x[1]) / 3, rtol=1e-14, atol=1e-15)
    assert torch.equal(grouped[3], x[3]) and torch.equal(grouped[2], x[2])


@orders
def test_the_mean_is_kept_and_the_variance_falls(order: list[int]) -> None:
    rows, x = Rows(order), dyadic(N, 5)
    pairs = rows.comm.all_reduce(rows.put(x), groups=[[0, 1], [2, 3], [4, 5]])
    assert torch.equal(pairs.sum(0), x.sum(0))
    assert bool((pairs.var(0) <= x.var(0)).all()) and not torch.equal(pairs.var(0), x.var(0))


@orders
def test_absent_nodes_neither_count_nor_change(order: list[int]) -> None:
    present = [0, 2, 5]
    rows, x = Rows(order, present), numbers(N, 4)
    away = [1, 3, 4]
    total = tree({i: x[i] for i in present})
    result = rows.back(rows.comm.all_reduce(rows.put(x), "sum"))
    assert all(torch.equal(result[i], total) for i in present) and torch.equal(result[away], x[away])
    result = rows.back(rows.comm.reduce(rows.put(x), dst=2))
    assert torch.equal(result[2], total) and torch.equal(result[[0, 1, 3, 4, 5]], x[[0, 1, 3, 4, 5]])
    result = rows.back(rows.comm.broadcast(rows.put(x), src=5))
    assert torch.equal(result[present], x[[5, 5, 5]]) and torch.equal(result[away], x[away])
    assert torch.equal(rows.comm.gather(rows.put(x), dst=0), x[present])
    assert torch.equal(rows.comm.all_gather(rows.put(x)), x[present].expand(N, 3, 4))
    slices = numbers(N, 3, 2)
    dealt = rows.back(rows.comm.scatter(rows.put(slices), src=2))
    assert torch.equal(dealt[present], slices[2]) and not dealt[away].any()
    dealt = rows.back(rows.comm.reduce_scatter(rows.put(slices)))
    expected = tree({i: slices[i].flatten() for i in present}).view(3, 2)
    assert torch.equal(dealt[present], expected) and not dealt[away].any()
    dealt = rows.back(rows.comm.all_to_all(rows.put(slices)))
    assert torch.equal(dealt[present], slices[present].transpose(0, 1)) and torch.equal(dealt[away], slices[away])
    decoded = rows.back(rows.comm.sum_decoded((rows.put(x),), lambda part: part * 2))
    assert torch.equal(decoded[present], (2 * total).expand(3, 4)) and torch.equal(decoded[away], 2 * x[away])
    rows.comm.barrier()
    assert rows.comm.ledger.tx_bytes[away].tolist() == rows.comm.ledger.rx_bytes[away].tolist() == [0.0] * 3
    assert rows.comm.ledger.payload_bytes[away].tolist() == [0.0] * 3
    assert all(set(event.members) <= set(present) for event in rows.events)


# Moving rows


@orders
def test_moving_rows(order: list[int]) -> None:
    rows, x = Rows(order), numbers(N, 3)
    assert torch.equal(rows.comm.broadcast(rows.put(x), src=4), x[4].expand(N, 3))
    assert torch.equal(rows.comm.gather(rows.put(x), dst=3), x)
    assert torch.equal(rows.comm.all_gather(rows.put(x)), x.expand(N, N, 3))
    slices = numbers(N, N, 2)
    assert torch.equal(rows.back(rows.comm.scatter(rows.put(slices), src=1)), slices[1])
    total = tree(dict(enumerate(slices.flatten(1)))).view(N, 2)
    assert torch.equal(rows.back(rows.comm.reduce_scatter(rows.put(slices))), total)
    assert torch.equal(rows.back(rows.comm.reduce_scatter(rows.put(slices), "max")), slices.amax(0))
    assert torch.equal(rows.back(rows.comm.all_to_all(rows.put(slices))), slices.transpose(0, 1))
    # Round trips: what was gathered can be scattered; reduce-scatter and all-gather are an all-reduce.
    gathered = rows.comm.gather(rows.put(x), dst=3)
    assert torch.equal(rows.back(rows.comm.scatter(gathered.expand(N, N, 3), src=3)), x)
    shards = rows.comm.reduce_scatter(rows.put(slices))
    whole = rows.comm.all_reduce(rows.put(slices), "sum")
    assert torch.equal(rows.comm.all_gather(shards), whole)


@orders
def test_exchange(order: list[int]) -> None:
    rows, x = Rows(order), numbers(N, 3)
    partner = [4, 1, 3, 2, 0, 5]  # 1 and 5 stay alone
    swapped = rows.back(rows.comm.exchange(rows.put(x), partner))
    assert torch.equal(swapped, x[partner])
    assert torch.equal(rows.back(rows.comm.exchange(rows.put(swapped), partner)), x)
    size = 12.0
    expected = [2 * size, 0, 2 * size, 2 * size, 2 * size, 0]
    ledger = rows.comm.ledger
    assert ledger.tx_bytes.tolist() == ledger.rx_bytes.tolist() == ledger.payload_bytes.tolist() == expected


@orders
def test_mix(order: list[int]) -> None:
    rows, x = Rows(order), dyadic(N, 3)
    ring = torch.zeros(N, N, dtype=torch.float64)
    for i in range(N):
        ring[i, i], ring[i, (i + 1) % N], ring[i, (i - 1) % N] = 0.5, 0.25, 0.25
    mixed = rows.back(rows.comm.mix(rows.put(x), ring))
    assert torch.equal(mixed, ring @ x)  # dyadic numbers: exact
    assert torch.equal(mixed.sum(0), x.sum(0)) and bool((mixed.var(0) <= x.var(0)).all())
    assert rows.comm.ledger.tx_bytes.tolist() == rows.comm.ledger.rx_bytes.tolist() == [2 * 24.0] * N
    lopsided = torch.eye(N, dtype=torch.float64)
    lopsided[0, 5] = 0.5  # node 0 hears node 5, and nobody hears node 0
    lopsided[3] = 0.0
    before = rows.comm.ledger.tx_bytes.copy(), rows.comm.ledger.rx_bytes.copy()
    assert torch.equal(rows.back(rows.comm.mix(rows.put(x), lopsided)), lopsided @ x)
    assert (rows.comm.ledger.tx_bytes - before[0]).tolist() == [0, 0, 0, 0, 0, 24.0]
    assert (rows.comm.ledger.rx_bytes - before[1]).tolist() == [24.0, 0, 0, 0, 0, 0]
    everyone = torch.full((N, N), 1 / N, dtype=torch.float64)
    same = rows.comm.mix(rows.put(x), everyone)
    torch.testing.assert_close(same, x.mean(0).expand_as(x), rtol=1e-14, atol=1e-14)
    assert torch.equal(same, same[:1].expand_as(same))


@orders
def test_mix_of_decoded_rows_sends_packed_rows(order: list[int]) -> None:
    rows, codes, scale = Rows(order), torch.randint(0, 255, (N, 5), dtype=torch.uint8), dyadic(N, 1)
    W = torch.eye(N, dtype=torch.float64).roll(1, 0) / 2 + torch.eye(N, dtype=torch.float64) / 2

    def decode(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale

    mixed = rows.back(rows.comm.mix_decoded([rows.put(codes), rows.put(scale)], decode, W))
    assert torch.equal(mixed, W @ decode(codes, scale))
    assert rows.comm.ledger.tx_bytes.tolist() == rows.comm.ledger.rx_bytes.tolist() == [5 + 8.0] * N


@orders
def test_sum_decoded_packs_then_sums_in_the_tree(order: list[int]) -> None:
    rows, x = Rows(order), torch.randint(0, 255, (N, 5), dtype=torch.uint8)
    scale = numbers(N, 1)
    decoded = x.float() * scale

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * scales

    payload = (rows.put(x), rows.put(scale))
    total = rows.comm.sum_decoded(payload, decode)
    assert torch.equal(total, tree(dict(enumerate(decoded))).expand(N, 5))
    (event,) = rows.events
    assert event.kind == "all_gather" and event.payload_bytes == 5 + 4
    assert event.tx_bytes.tolist() == event.rx_bytes.tolist() == [(N - 1) * 9.0] * N
    rows.comm.present = [1, 4]
    part = rows.back(rows.comm.sum_decoded(payload, decode, "mean"))
    assert torch.equal(part[4], (decoded[1] + decoded[4]) / 2) and torch.equal(part[1], part[4])
    assert torch.equal(part[[3, 5]], decoded[[3, 5]])


# Bytes


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 13])
def test_bytes_of_each_collective(n: int) -> None:
    rows = Rows(list(range(n)))
    x = numbers(n, n, 5, dtype=torch.float64)
    size = n * 5 * 8

    def bytes_of(call: str, **options: object) -> tuple[float, list[float], list[float]]:
        getattr(rows.comm, call)(x, **options)
        event = rows.events[-1]
        assert event.members == tuple(range(n)) and event.tag == "parameters"
        return event.payload_bytes, event.tx_bytes.tolist(), event.rx_bytes.tolist()

    alone = n == 1
    payload = 0.0 if alone else size
    ring = pytest.approx([2 * (n - 1) / n * size] * n)
    assert bytes_of("all_reduce") == (payload, ring, ring)
    star = [0.0 if alone else float(size)] * n
    assert bytes_of("all_reduce", algorithm="server") == (payload, star, star)
    assert bytes_of("all_gather") == (payload, [(n - 1.0) * size] * n, [(n - 1.0) * size] * n)
    half = pytest.approx([(n - 1) / n * size] * n)
    assert bytes_of("reduce_scatter") == bytes_of("all_to_all") == (payload, half, half)
    for root in range(n):
        others = [0.0 if i == root else float(size) for i in range(n)]
        _, sent, got = bytes_of("broadcast", src=root)
        assert got == others and sum(sent) == (n - 1) * size
        depth = (n - 1).bit_length()  # a binomial tree: the root sends as many times as there are levels
        assert sent[root] == max(sent) == depth * size
        _, sent, got = bytes_of("reduce", dst=root)
        assert sent == others and sum(got) == (n - 1) * size and got[root] == depth * size
        _, sent, got = bytes_of("gather", dst=root)
        assert sent == others and sum(got) == got[root] == (n - 1) * size
        _, sent, got = bytes_of("scatter", src=root)
        assert sum(sent) == sent[root] == pytest.approx((n - 1) / n * size) == sum(got)
    rows.comm.barrier()
    assert rows.events[-1].payload_bytes == rows.events[-1].tx_bytes.sum() == 0


def test_the_ledger_adds_up_and_keeps_buffers_apart() -> None:
    rows, x = Rows(list(range(4))), numbers(4, 3)
    rows.comm.all_reduce(x)
    with rows.comm.counted_as("buffers"):
        rows.comm.all_reduce(x, groups=[[0, 1]])
    rows.comm.all_reduce(x, groups=[[2, 3]], algorithm="server")
    ledger = rows.comm.ledger
    assert ledger.payload_bytes.tolist() == [12, 12, 24, 24]
    assert ledger.tx_bytes.tolist() == ledger.rx_bytes.tolist() == [18, 18, 30, 30]
    assert ledger.buffer_bytes.tolist() == [12, 12, 0, 0]
    assert [event.tag for event in rows.events] == ["parameters", "buffers", "parameters"]
    again = Communicator(range(4), 4).ledger
    again.load_state(ledger.state())
    for name in ("payload_bytes", "tx_bytes", "rx_bytes", "buffer_bytes"):
        assert np.array_equal(getattr(again, name), getattr(ledger, name))
    again.payload_bytes += 1
    assert ledger.payload_bytes.tolist() == [12, 12, 24, 24]  # no memory is shared


# Errors


def test_errors_say_what_was_wrong() -> None:
    comm, x = Communicator(range(4), 4), numbers(4, 3)
    comm.present = [0, 1, 3]
    cases = [
        (lambda: comm.all_reduce(x, "avg"), "op='avg'"),
        (lambda: comm.reduce(x, op="median"), "op='median'"),
        (lambda: comm.reduce_scatter(numbers(4, 3, 2), op="median"), "op='median'"),
        (lambda: comm.all_reduce(x, "sum", weights=torch.ones(4)), "weights need op='mean', not 'sum'"),
        (
            lambda: comm.all_reduce(x, weights=torch.tensor([1.0, -1.0, 1.0, 1.0])),
            "must be at least 0 with a sum over 0",
        ),
        (lambda: comm.all_reduce(x, weights=torch.zeros(4)), "sum over 0"),
        (lambda: comm.all_reduce(x, algorithm="star"), "algorithm='star'"),
        (lambda: comm.all_reduce(x, groups=[[0, 1], [1, 2]]), "disjoint"),
        (lambda: comm.all_reduce(x, groups=[[0, 4]]), "from 0 to 3"),
        (lambda: comm.all_reduce(x, groups=[[0], []]), "not empty"),
        (lambda: comm.broadcast(x, src=2), "node 2 does not take part"),
        (lambda: comm.reduce(x, dst=2), "node 2 does not take part"),
        (lambda: comm.gather(x, dst=9), "node 9 does not take part"),
        (lambda: comm.scatter(numbers(4, 3), src=2), "node 2 does not take part"),
        (lambda: comm.scatter(numbers(4, 4)), r"one slice per node: \(rows, 3, ...\), not \(4, 4\)"),
        (lambda: comm.reduce_scatter(numbers(4)), "one slice per node"),
        (lambda: comm.all_to_all(numbers(4, 4)), "all_to_all needs one slice per node"),
        (lambda: comm.exchange(x, [1, 2, 0, 3]), "node 0 names 1 and node 1 names 2"),
        (lambda: comm.exchange(x, [1, 0]), "must name a node"),
        (lambda: comm.exchange(x, [0, 1, 2, 4]), "must name a node"),
        (lambda: comm.mix(x, torch.eye(3)), r"shape \(4, 4\), but has \(3, 3\)"),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError, match=message):
            call()
    assert comm.ledger.tx_bytes.sum() == 0  # nothing was counted


def test_traffic_adds_up_per_collective_and_survives_saving() -> None:
    comm = Communicator(range(4), 4)
    comm.all_reduce(torch.ones(4, 6))
    comm.all_reduce(torch.ones(4, 6), groups=[[0, 1], [2, 3]])
    comm.all_gather(torch.ones(4, 2))
    with comm.counted_as("buffers"):
        comm.broadcast(torch.ones(4, 2))
    reduced = {
        "calls": 3,
        "payload_bytes": 2 * 4 * 24,
        "tx_bytes": 4 * 1.5 * 24 + 4 * 24,
        "rx_bytes": 4 * 1.5 * 24 + 4 * 24,
    }
    gathered = {"calls": 1, "payload_bytes": 4 * 8, "tx_bytes": 4 * 3 * 8, "rx_bytes": 4 * 3 * 8}
    buffers = {"calls": 1, "payload_bytes": 8, "tx_bytes": 3 * 8, "rx_bytes": 3 * 8}
    wanted = {"ring all_reduce": reduced, "ring all_gather": gathered, "tree broadcast of buffers": buffers}
    assert comm.ledger.traffic == wanted
    again = Communicator(range(4), 4)
    again.ledger.load_state(comm.ledger.state())
    assert again.ledger.traffic == wanted
