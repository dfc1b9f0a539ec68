"""Predictions by formula: against real runs, against the clock, and the laws they obey."""

import copy
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from paths import ROOT
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.cli import main
from exogym.core.clock import Clock, StepTime, seconds_of
from exogym.core.communicator import Event
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy import CommunicateOptimizeStrategy, DiLoCoStrategy, SimpleReduceStrategy, Strategy
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.registry import parse_strategy
from exogym.strategy.traffic import ModelSize, shapes_of
from exogym.study.advise import Plan, Traffic, Work, advise, plan_of
from exogym.study.compare import compare
from exogym.study.tasks import load_task, size_of, skew_of

P, N, T = 1e8, 8, 0.2
LINE = Network("1Gbps", "1ms")
PAGE = ROOT / "docs" / "network.md"


def row(strategy, network=LINE, **options):
    options = {"parameters": P, "num_nodes": N, "step_seconds": T, "algorithm": "recorded"} | options
    return advise(network=network, strategies=[strategy], **options).rows[0]


# Bytes: what real runs count


EXACT = (
    "ddp", "demo", "diloco:H=5", "fedavg:H=5", "fedavg:H=5:client_fraction=0.5", "fedavg:H=5:island_size=2",
    "sparta:p_sparta=0.25:compression_method=sequential",
    "sparta:p_sparta=0.25:compression_method=sequential:quantization_bits=8",
    "sparta:p_sparta=0.25:compression_method=topk", "sparta_diloco:H=5:p_sparta=0.25:compression_method=sequential",
)  # fmt: skip


@pytest.mark.parametrize("text", EXACT)
def test_bytes_are_those_of_a_real_run(text):
    steps, nodes = 20, 4
    trainer = LocalTrainer(
        nn.Linear(64, 64, bias=False),
        TensorDataset(torch.randn(64, 64), torch.randint(0, 64, (64,))),
        loss_fn=F.cross_entropy,
    )
    trainer.fit(parse_strategy(text), num_nodes=nodes, max_steps=steps, batch_size=4, device="cpu", final_sync=False)
    counted = [r for r in trainer.history if r["step"] == steps][-1]["tx_bytes"] / steps
    assert row(text, parameters=4096, num_nodes=nodes).tx_bytes_per_step == pytest.approx(counted)


@pytest.mark.parametrize(
    "text", ["demo", "powersgd", "powersgd:rank=1", "powersgd:min_rate=50", "sparseloco:H=5", "sparseloco:H=5:bits=32"]
)
def test_bytes_follow_the_shapes_of_a_small_model(text):
    """By the number of parameters alone, PowerSGD's bytes would be 28 times too few here."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 10))
    data = TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
    size = ModelSize.of(x.shape for x in model.parameters())
    trainer = LocalTrainer(model, data, loss_fn=F.cross_entropy)
    trainer.fit(parse_strategy(text), num_nodes=4, max_steps=20, batch_size=4, device="cpu", final_sync=False)
    counted = [r for r in trainer.history if r["step"] == 20][-1]["tx_bytes"] / 20
    assert size == 5490 and size.shapes[:2] == ((48, 64), (48,))
    assert row(text, parameters=size, num_nodes=4).tx_bytes_per_step == pytest.approx(counted, abs=1)


def test_a_size_is_a_number_that_may_know_its_shapes():
    size = ModelSize.of([(3, 2), (), (0, 5)])  # a parameter without elements sends nothing
    for same in (size, copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
        assert (same, shapes_of(same), json.dumps(same)) == (7, ((3, 2), ()), "7.0")
    assert shapes_of(ModelSize(5)) is None and shapes_of(7) is None
    for text in ("demo", "powersgd", "sparseloco:H=5"):
        assert row(text, parameters=size, num_nodes=2).tx_bytes_per_step > 0


def test_earlier_runs_on_like_data_decide():
    """Methods that averaged rarely never arrived where each node had few labels."""
    asked = {"parameters": 1e6, "num_nodes": 4, "network": "200Mbps,10ms", "step_seconds": 0.05}
    plain, dealt, few = (
        advise(**asked, skew=skew, strategies=["ddp", "demo", "powersgd", "diloco:H=30", "fedavg:H=30"])
        for skew in (None, 0.0, 0.6)
    )
    assert any("those with a label skew near 0.60 count most" in line for line in few.assumptions)
    assert not any("label skew" in line for line in plain.assumptions)
    steps = [{row.strategy: row.ddp_steps for row in each.rows} for each in (dealt, few)]
    assert steps[0] != steps[1]
    with pytest.raises(ArgumentError, match=r"skew=1\.5"):
        advise(**asked, skew=1.5)


def test_a_task_has_its_own_skew(capsys):
    assert [round(skew_of(load_task("digits"), n), 2) for n in (4, 16)] == [0.29, 0.34]
    assert skew_of(load_task("shakespeare"), 4) == 0  # dealt at random
    words = ["advise", "--network", "wifi", "--step-seconds", "0.1"]
    assert main([*words, "--dataset", "digits"]) == 0
    assert "label skew near 0.29" in capsys.readouterr().out
    assert main([*words, "--parameters", "1M", "--nodes", "4", "--skew", "0.6"]) == 0
    assert "label skew near 0.60" in capsys.readouterr().out
    assert main([*words, "--dataset", "digits", "--skew", "0.6"]) == 2
    assert "--skew needs --parameters" in capsys.readouterr().err


@pytest.mark.parametrize("tcp", [False, True])
def test_one_node_on_a_network_of_one(tcp):
    network = Network.matrix([["1Gbps"]], "5ms", tcp=tcp)
    assert row("ddp", network, num_nodes=1, step_seconds=1.0).seconds_per_step == 1


def test_formulas_of_the_papers():
    assert row("ddp").tx_bytes_per_step == 2 * (N - 1) / N * P * 4
    assert row("ddp", bytes_per_element=2).tx_bytes_per_step == 2 * (N - 1) / N * P * 2
    assert row("streaming_diloco:H=100:bits=4").tx_bytes_per_step == pytest.approx((N - 1) * P / 2 / 100)
    for same in ("diloco:H=100:eager=true", "streaming_diloco:H=100", "muloco:H=100"):
        assert row(same).tx_bytes_per_step == row("diloco:H=100").tx_bytes_per_step
    (piece,) = plan_of("streaming_diloco:H=100:num_fragments=8:bits=4", P, N).traffic
    assert piece.payload_bytes == P / 8 / 2 and piece.every_steps == 12.5


# Time: what the clock says


@pytest.mark.parametrize(
    "text", ["ddp", "diloco:H=10", "fedavg:H=4", "sparta:p_sparta=0.01", "sparta_diloco:H=10", "demo"]
)
@pytest.mark.parametrize("network", ["lan-1g", "home", Network.groups([4, 4], "10Gbps", "100Mbps,20ms")], ids=repr)
def test_time_is_that_of_the_clock(text, network):
    network = Network.of(network) if isinstance(network, Network) else Network.of(f"{network},jitter=0")
    times = np.linspace(0.1, 0.3, N)
    clock, steps, ids = Clock(N, network, times), 20, tuple(range(N))
    plan = plan_of(text, P, N)
    for step in range(1, steps + 1):
        clock.advance(1)
        for t in plan.traffic:
            if step % t.every_steps == 0:
                clock.event(Event(t.kind, "ring", ids, t.payload_bytes, np.zeros(N), np.zeros(N), "parameters", ids))
    told = row(text, network, step_seconds=times)
    assert told.seconds_per_step * steps == pytest.approx(clock.time_s.max(), rel=1e-6)
    assert told.utilisation == pytest.approx(clock.share("computing").mean(), rel=1e-6)
    assert told.waiting_share == pytest.approx(clock.waiting_share.mean(), rel=1e-6)


@pytest.mark.parametrize("H", [1, 10])
def test_chance_makes_everyone_wait_for_the_slowest(H):
    time, steps = StepTime(T, sigma=0.3, straggler_share=0.01), 200
    clock = Clock(N, "450GB/s", time)
    for _ in range(steps // H):
        clock.advance(H)
        clock.event(Event("barrier", "tree", tuple(range(N)), 0, np.zeros(N), np.zeros(N), "parameters", ()))
    told = row(f"diloco:H={H}", "450GB/s", step_seconds=time, parameters=1)
    assert told.seconds_per_step == pytest.approx(clock.time_s[0] / steps, rel=0.12)
    assert told.seconds_per_step > time.mean_s(N).max()
    assert row("diloco:H=100", "450GB/s", step_seconds=time).seconds_per_step < told.seconds_per_step


# Laws


TEXTS = ("ddp", "demo", "diloco:H=10", "fedavg:H=10:client_fraction=0.5", "fedavg:H=10:island_size=2", "sparta",
         "sparta_diloco", "async_diloco:H=10", "streaming_diloco:H=100", "diloco:H=100:eager=true")  # fmt: skip


@pytest.mark.parametrize("algorithm", ["recorded", "cheapest"])
@pytest.mark.parametrize("text", TEXTS)
def test_more_bandwidth_is_never_slower_and_nothing_beats_computing(text, algorithm):
    times = [row(text, Network(b, "1ms"), algorithm=algorithm).seconds_per_step for b in (1e7, 1e8, 1e9, 1e10, 1e15)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] >= T
    for network in (LINE, "nvlink", "home", "wan"):
        told = row(text, network, algorithm=algorithm)
        assert told.waiting_share + told.utilisation == pytest.approx(1) and 0 <= told.waiting_share < 1
        assert told.seconds_per_step >= T


def test_overlap_hides_what_fits():
    cost = LINE.cost("all_reduce", P * 4, N).seconds
    for H in (10, 20, 40, 100):
        assert row(f"diloco:H={H}:eager=true").seconds_per_step == pytest.approx(T + max(0, cost - H * T) / H)
        assert row(f"diloco:H={H}:delay=5").seconds_per_step == pytest.approx(T + max(0, cost - 5 * T) / H)
    blocking, hidden = (row(f"streaming_diloco:H=100:num_fragments=8:fragment_sync_delay={d}") for d in (0, 12))
    assert hidden.seconds_per_step < blocking.seconds_per_step
    assert hidden.tx_bytes_per_step == blocking.tx_bytes_per_step


@pytest.mark.parametrize("text", TEXTS)
def test_one_node_has_nobody_to_wait_for(text):
    told = row(text, num_nodes=1)
    assert (told.seconds_per_step, told.tx_bytes_per_step, told.waiting_share) == (T, 0, 0)


def test_work_and_device_make_the_step():
    assert row("ddp", step_seconds=Work(1e15, "a100", 0.5)) == row("ddp", step_seconds=seconds_of(1e15, "a100", 0.5))


def test_the_answer_is_ranked_and_says_what_it_assumed():
    advice = advise(parameters=P, num_nodes=N, network="lan-1g", step_seconds=T)
    assert (times := [r.seconds for r in advice.rows]) == sorted(times) and len(times) == 18
    assert [r.keeps_up for r in advice.rows] == [r.utilisation >= 0.9 for r in advice.rows]
    text = str(advice)
    assert all(line in text for line in advice.assumptions) and f"{advice.recommended.strategy} *" in text
    run, takes, because = text.splitlines()[:3]
    assert f"--strategies ddp,{advice.recommended.strategy} " in run and run.startswith("run: exogym compare ")
    assert takes.startswith("takes: ") and because.startswith("because it has the smallest expected time")
    assert "†" not in text
    assert "8 nodes, 1e+08 parameters of 4 bytes" in text and "941 Mbps" in text
    work = advise(parameters=P, num_nodes=N, network="lan-1g", step_seconds=Work(1e14), strategies=["ddp"])
    assert any("40% of 9.89e+14" in line for line in work.assumptions)


def test_a_fast_network_recommends_the_gradient_average_and_a_slow_one_another():
    fast = advise(parameters=P, num_nodes=N, network="nvlink", step_seconds=T)
    assert fast.recommended.strategy == "ddp"
    slow = advise(parameters=1e12, num_nodes=N, network="home", step_seconds=T)
    assert slow.recommended.strategy != "ddp" and slow.rows[-1].strategy == "ddp"
    formula = Plan("mine", (Traffic("all_reduce", 1.0),), 1, can_train=False)
    nothing = advise(parameters=1e12, num_nodes=N, network="home", step_seconds=T, strategies=[formula])
    assert nothing.recommended is None and nothing.because == "no strategy that can be trained here is among them"
    assert str(nothing).startswith("run: nothing\n") and "mine †" in str(nothing)
    beside = advise(parameters=1e12, num_nodes=N, network="home", step_seconds=T, strategies=[formula, "ddp"])
    assert [r.strategy for r in beside.rows] == ["ddp", "mine"] and beside.recommended is beside.rows[0]


def test_every_column_has_its_unit():
    headers, rows = advise(parameters=1e8, num_nodes=N, network="home", step_seconds=0.5, strategies=["ddp"]).table()
    assert headers[1:-1] == ["time to loss", "steps/DDP's", "time/step", "sent/node/step", "waiting", "computing",
                             "speed-up/one node"]  # fmt: skip
    assert [cell.lstrip("0123456789.").strip() for cell in rows[0][1:-1]] == ["h", "×", "min", "MB", "%", "%", "×"]


def test_what_comes_late_couples_later():
    texts = ["diloco:H=100", "diloco:H=100:delay=10", "streaming_diloco:H=100:fragment_sync_delay=1",
             "diloco:H=100:eager=true"]  # fmt: skip
    assert [row(text).couples_every for text in texts] == [100, 110, 101, 200]


def test_a_slow_node_does_not_spoil_the_advice():
    """All wait for it whatever the strategy: what counts is whether it computes."""
    advice = advise(parameters=P, num_nodes=4, network="nvlink", step_seconds=T, speeds=[1, 1, 1, 0.25])
    row = next(row for row in advice.rows if row.strategy == "ddp")
    assert row.keeps_up and row.utilisation < 0.5 and row.speedup == pytest.approx(4 / 4, rel=0.01)


def test_speed_up_is_examples_per_second_over_one_node():
    assert row("ddp", "450GB/s,0s", parameters=1).speedup == pytest.approx(N)
    told = row("ddp", "1Mbps")
    assert told.speedup == pytest.approx(N * T / told.seconds_per_step) and told.speedup < 1


def test_advice_as_json():
    advice = advise(parameters=P, num_nodes=1, network="wifi", step_seconds=T)
    told = json.loads(json.dumps(advice.to_dict(), allow_nan=False))
    assert [r["strategy"] for r in told["rows"]] == [r.strategy for r in advice.rows]
    assert told["recommended"] == advice.recommended.strategy and told["assumptions"] == advice.assumptions


def test_the_page_shows_what_is_printed(capsys):
    ((command, shown),) = re.findall(r"\nexogym (advise .*)\n```\n\n```text\n(.*?)```", PAGE.read_text(), re.S)
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in shown.splitlines() if line not in ("", "...")]
    assert len(lines) == 7 and [line for line in printed if line in lines] == lines


# Nodes that do not wait for each other


@pytest.mark.parametrize("dylu", ["false", "true"])
def test_rounds_that_nobody_waits_for(dylu):
    """Each node by itself: H_w steps, a push and a pull over its own line."""
    times, end_s = np.array([0.1, 0.2, 0.2, 0.5]), 4000
    network = Network(up="20Mbps", down="100Mbps", latency="10ms", server="1Tbps")
    told = row(f"async_diloco:H=10:dylu={dylu}", network, num_nodes=4, step_seconds=times, parameters=1e6)
    steps = np.array([10, 5, 5, 2]) if dylu == "true" else np.full(4, 10)
    round_s = steps * times + 2 * 0.01 + 32e6 / 20e6 + 32e6 / 100e6
    taken = (end_s / round_s * steps).sum()
    assert told.seconds_per_step == pytest.approx(end_s / (taken / 4))
    assert told.utilisation == pytest.approx((steps * times / round_s).mean())
    assert told.tx_bytes_per_step * taken / 4 == pytest.approx((end_s / round_s * 4e6).mean())
    other = row("diloco:H=10", network, num_nodes=4, step_seconds=times, parameters=1e6)
    assert told.seconds_per_step < other.seconds_per_step


def test_nodes_with_their_own_links_do_not_wait_for_each_other_either():
    matrix = np.full((4, 4), 1e9)
    matrix[3, :] = matrix[:, 3] = 1e6  # one node is far away
    near, far = (
        row("async_diloco:H=10", Network.matrix(m), num_nodes=4, parameters=1e6) for m in (matrix * 0 + 1e9, matrix)
    )
    assert far.utilisation == pytest.approx(near.utilisation, abs=0.3) and far.utilisation < near.utilisation
    assert row("diloco:H=10", Network.matrix(matrix), num_nodes=4, parameters=1e6).utilisation < far.utilisation / 3


@pytest.mark.parametrize("server", ["10Gbps", None])  # None: as fast as the nodes' lines
def test_a_server_carries_no_more_than_its_line(server):
    """N messages of S bytes a round each way, over a line of B: R = N S / B once it is full."""
    network, texts = Network("10Gbps", "10ms", server=server), ["async_diloco:H=100", "fedasync:H=100", "diloco:H=100"]
    given = {"parameters": 1e9, "network": network, "step_seconds": 1.0, "strategies": texts}
    for nodes in (8, 64, 10_000):
        advice = advise(num_nodes=nodes, **given)
        rows = {row.strategy: row for row in advice.rows}
        alone_s = 100 + 2 * (0.01 + 32e9 / 10e9)
        full_s = nodes * 32e9 / 10e9
        told = [line for line in advice.assumptions if "the server's line of 10 Gbps is the bottleneck" in line]
        for text in texts[:2]:
            assert rows[text].seconds_per_step * 100 == pytest.approx(max(alone_s, full_s))
            assert rows[text].utilisation == pytest.approx(100 / max(alone_s, full_s))
            assert any(line.startswith(text) for line in told) == (full_s > alone_s)
        assert len(told) == (2 if full_s > alone_s else 0)
        assert nodes == 8 or advice.recommended.strategy == "diloco:H=100"


def test_servers_of_islands_and_unequal_nodes_share_lines_too():
    """No fleet sends faster than its server's line; relays from islands fill the line of the server above them."""
    unlike = {"step_seconds": [0.1, 0.1, 0.2, 0.8], "num_nodes": 4, "parameters": 1e6}
    for text in ("async_diloco:H=10", "async_diloco:H=10:dylu=true", "decoupled_diloco:H=10:quorum=2"):
        full, free = (row(text, Network("100Mbps", "1ms", server=line), **unlike) for line in ("1Mbps", "1Gbps"))
        full_bps, free_bps = (8 * 4 * told.tx_bytes_per_step / told.seconds_per_step for told in (full, free))
        limit = pytest.approx(1e6, rel=0.01)
        assert full_bps == limit if "async" in text else full_bps < 1e6  # where pulls share it as well
        assert free_bps > 1e7
    few, many = (
        row("halos:H=10", Network("10Gbps", "1ms", server="10Gbps"), num_nodes=n, step_seconds=1.0) for n in (8, 8000)
    )
    relayed_s = 8000 * 3.2e9 / 10e9 / 16  # an island relays every 16 arrivals
    assert few.seconds_per_step < 1.3 and many.seconds_per_step == pytest.approx(relayed_s / 10)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", ["async_diloco:H=10", "decoupled_diloco:H=10", "halos:H=10:island_size=3"])
def test_a_node_without_a_round_among_thousands_of_others_counts_too(text):
    """A node ten thousand times as slow as the others adds its own few steps to theirs."""
    unlike = {"network": Network([1e9, 5e7, 1e9, 1e9, 1e9], "10ms"), "num_nodes": 5, "parameters": 1e6}
    many, slower = (row(text, step_seconds=[0.05] * 4 + [slow_s], **unlike) for slow_s in (500.0, 1000.0))
    assert many.seconds_per_step == pytest.approx(slower.seconds_per_step, rel=1e-3)
    assert 0 < many.utilisation < 1


# With a simulation

TASK = load_task("digits")
SLOW = {"network": "1Mbps,20ms", "step_seconds": "10ms", "max_steps": 40}


@pytest.mark.parametrize("network", ["1Mbps,20ms", "100Mbps,1ms", "100Mbps,5ms,tcp=true"])
def test_formula_and_clock_agree(network):
    """But for SPARTA's last average of the whole model."""
    texts = [
        "ddp",
        "demo",
        "diloco:H=5",
        "diloco:H=10",
        "fedavg:H=2",
        "sparta:p_sparta=0.25:compression_method=sequential",
    ]
    speeds = [1, 1, 0.8, 0.5]
    options = {"network": network, "step_seconds": "10ms", "speeds": speeds}
    result = compare(TASK, texts, max_steps=40, seeds=1, val_interval=40, **options)  # an evaluation ends a stretch
    advice = advise(
        parameters=size_of(TASK), num_nodes=4, network=network, step_seconds="10ms", speeds=speeds, strategies=texts,
        algorithm="recorded",
    )  # fmt: skip
    clock = {r["strategy"]: r["time_s"] / 40 for r in result.rows}
    waited = {r["strategy"]: r["waiting_share"] for r in result.rows}
    for told in advice.rows:
        rough = 0.06 if told.strategy.startswith("sparta") else 0.0
        assert told.seconds_per_step == pytest.approx(clock[told.strategy], rel=1e-3 + rough)
        assert told.waiting_share == pytest.approx(waited[told.strategy], abs=1e-3 + rough)


def test_ten_thousand_nodes_and_any_size():
    advice = advise(parameters=1e12, num_nodes=10_000, network=Network.groups([100] * 100, "nvlink", "wan,jitter=0"),
                    step_seconds=StepTime("10s", sigma=0.1))  # fmt: skip
    assert all(math.isfinite(r.seconds_per_step) for r in advice.rows)


def test_each_object_has_its_own_belief():
    """Objects of one class need other steps, as their texts do; a DDP object needs DDP's."""
    objects = [SimpleReduceStrategy(), DiLoCoStrategy(H=10), DiLoCoStrategy(H=500)]
    given = {"parameters": P, "num_nodes": 4, "network": LINE, "step_seconds": T}
    rows = {row.strategy: row for row in advise(**given, strategies=objects).rows}
    texts = {row.strategy: row for row in advise(**given, strategies=["ddp", "diloco:H=10", "diloco:H=500"]).rows}
    for strategy, text in zip(objects, ("ddp", "diloco:H=10", "diloco:H=500"), strict=True):
        assert rows[repr(strategy)].ddp_steps == texts[text].ddp_steps
    assert len({row.ddp_steps for row in rows.values()}) == 3 and rows["SimpleReduceStrategy()"].ddp_steps == 1
    one, other = (Plan("mine", (Traffic("all_reduce", 4 * P, every),), every) for every in (1, 100))
    with pytest.raises(ArgumentError, match="'mine' 2 times"):
        advise(**given, strategies=[one, other])


def test_strategies_may_be_objects_and_plans():
    assert row(DiLoCoStrategy(H=10)).seconds_per_step == row("diloco:H=10").seconds_per_step
    mine = CommunicateOptimizeStrategy("sgd", [AveragingCommunicator(H=7)])
    assert row(mine).tx_bytes_per_step == row("fedavg:H=7").tx_bytes_per_step
    plan = Plan("mine", (Traffic("all_gather", 1000.0, 5), Traffic("all_reduce", 8000.0, 10, members=4)), 10)
    wanted = LINE.cost("all_gather", 1000, N).seconds / 5 + LINE.cost("all_reduce", 8000, 4).seconds / 10
    assert row(plan).seconds_per_step == pytest.approx(T + wanted)


class ForOneNode(Strategy):
    def step(self):
        super().step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ["dilco"]}, "did you mean 'diloco'"),
        ({"strategies": ["diloco:HH=3"]}, "no option 'HH'"),
        ({"strategies": ["streaming_diloco:fragments=3"]}, "did you mean 'num_fragments'"),
        ({"strategies": ["streaming_diloco:H=often"]}, "H='often'"),
        ({"strategies": ["streaming_diloco:bits=0"]}, "bits=0"),
        ({"strategies": ["diloco:eager=true:H=0"]}, "H=0"),
        ({"strategies": ["streaming:H=100"]}, "unknown strategy 'streaming': it is 'streaming_diloco' here"),
        ({"strategies": [ForOneNode()]}, "no formula is known for ForOneNode"),
        ({"strategies": ["fedavg:local_epochs=2"]}, "give H instead"),
        ({"step_seconds": None}, "the time of a step is missing"),
        ({"flops": 1e9}, r"no argument 'flops': pass step_seconds=Work\("),
        ({"step_seconds": 0}, "a step must take time"),
        ({"step_seconds": [1, 2, 3]}, "step_seconds is for 3 nodes"),
        ({"network": Network.matrix(np.ones((2, 2)))}, "network is for 2 nodes"),
        ({"parameters": 0}, "parameters=0"),
        ({"bytes_per_element": -1}, "bytes_per_element=-1"),
        ({"steps": 0}, "steps=0"),
        ({"skew": 2}, "skew=2"),
        ({"target_utilisation": 0.9}, "no argument 'target_utilisation': it is retired: "),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"algorithm": "best"}, "algorithm='best'"),
        ({"parametres": 3}, "did you mean 'parameters'"),
        ({"speeds": [1, 2]}, "speeds is for 2 nodes"),
        ({"speeds": [1] * N, "step_seconds": StepTime(1)}, "speeds cannot be combined with a StepTime"),
        ({"strategies": ["async_diloco:grace_s=1"]}, "grace_s=1.*: no formula is known.*leave grace_s out"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        advise(**{"parameters": P, "num_nodes": N, "network": LINE, "step_seconds": T} | options)
