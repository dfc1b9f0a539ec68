"""CocktailSGD: at every step nodes send the largest of a random share of their differences, in few bits.

Wang et al., CocktailSGD: Fine-tuning foundation models over 500Mbps networks, ICML 2023, as in the authors' code
(DS3Lab/CocktailSGD). theta are the common parameters, theta_i node i's parameters, and Q the compressor. A row's
columns are divided into N shards, one per node. After each inner step, all nodes draw the same set I of columns from
the seed, a share p of each shard. On I

    q_i = Q(theta_i - theta);   theta_i <- theta_i - q_i            each node sends q_i to the shards' nodes
    d = Q(mean_i q_i + s);   s <- mean_i q_i + s - d                each node serves its shard and sends d to all
    theta_i <- theta_i + d;   theta <- theta + d

Q keeps the k largest of a shard's m drawn entries and quantizes them to `bits` bits (`exogym.compress.Absmax`; the
authors' code scales slightly differently). The rest of a node's difference stays in theta_i, and the rest of a mean in
s, which starts at 0, so both are error feedback. The authors send during the next step; here nodes wait. Evaluation
uses theta.

Payload per step, with w = ceil(P / N), m = round(p w), k = floor(topk m) and S = ceil(m / 8) + ceil(k bits / 8) + 4
ceil(k / bucket): N S bytes in an all-to-all and S bytes in an all-gather; tx = rx = 2 (N-1) S. Buffers are averaged at
every step and counted separately. A single node sends nothing and sets theta <- theta_i.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from exogym.contrib.quantized_reduce import through_shards
from exogym.core.base.rng import numpy_generator
from exogym.core.communicator.messages import as_bytes, from_bytes
from exogym.core.compress import Absmax, Compressor, Quantized, buckets
from exogym.core.compress.compressor import Payload
from exogym.core.compress.quantize import pack, unpack
from exogym.core.fleet import Block, Fleet
from exogym.errors import check_count, check_number
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic


class LargestInBits(Compressor):
    """Encode the k largest of `count` numbers: a bit per number marks them, and their values take `bits` bits.

    The payload is ceil(count / 8) + ceil(k bits / 8) + 4 ceil(k / bucket) bytes, or ceil(count / 8) + k b for numbers
    of b bytes if `bits` is None.
    """

    def __init__(self, count: int, k: int, bits: int | None, bucket: int):
        self.count, self.k = count, k
        self.values = None if bits is None else Quantized(Absmax(bits), buckets(k, bucket))

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Payload:
        at = torch.stack([row.abs().topk(self.k).indices for row in x]).sort(1).values
        is_sent = torch.zeros_like(x, dtype=torch.int32).scatter_(1, at, 1)
        values = x.gather(1, at)
        return [pack(is_sent, 1), *([values] if self.values is None else self.values.encode(values))]

    def decode(self, *payload: Tensor) -> Tensor:
        is_sent, *packed = payload
        values = packed[0] if self.values is None else self.values.decode(*packed)
        at = unpack(is_sent, 1, self.count).nonzero()[:, 1].view(len(values), self.k)
        return values.new_zeros(len(values), self.count).scatter_(1, at, values)


class CocktailCommunicator(PeriodicModule):
    """Exchange compressed differences from the common parameters after every step.

    Args:
        p, topk, bits, bucket: see `CocktailSGDStrategy`.

    State: theta, (P,); each node's s for the entries that it has served, (rows, P).
    """

    def __init__(self, p: float, topk: float, bits: int | None, bucket: int):
        super().__init__()
        check_number("p", p, over=0, most=1, more=": the share of the entries that are drawn")
        check_number("topk", topk, over=0, most=1, more=": the share of the drawn entries to send")
        check_count("bucket", bucket)
        self.p, self.topk, self.bits, self.bucket = p, topk, bits, bucket
        self._compressor(1)  # checks `bits`

    def _compressor(self, w: int) -> LargestInBits:
        m = max(1, round(self.p * w))
        return LargestInBits(m, max(1, int(self.topk * m)), self.bits, self.bucket)

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        C = self._compressor(math.ceil(P / N))
        of_values = C.k * b if self.bits is None else math.ceil(C.k * self.bits / 8) + 4 * math.ceil(C.k / self.bucket)
        S = math.ceil(C.count / 8) + of_values
        return [Traffic("all_to_all", N * S), Traffic("all_gather", S)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        for b, block in enumerate(fleet.blocks):
            wide = torch.promote_types(block.params.dtype, torch.float32)
            self.shared_state[f"theta.{b}"] = block.params[0].to(wide, copy=True)
            self.row_state[f"server.{b}"] = torch.zeros_like(block.params, dtype=wide)

    def communicate(self, fleet: Fleet, step: int) -> None:
        for b, block in enumerate(fleet.blocks):
            theta = self.shared_state[f"theta.{b}"]
            if fleet.num_nodes == 1:
                theta.copy_(block.params[0])
            else:
                self._exchange(fleet, block, b, theta, step)
        fleet.synchronise_buffers()

    def _exchange(self, fleet: Fleet, block: Block, b: int, theta: Tensor, step: int) -> None:
        P, n, servers = len(theta), fleet.num_nodes, self.row_state[f"server.{b}"]
        w = -(-P // n)
        C = self._compressor(w)
        drawn = numpy_generator(self.run.seed, "cocktail", b, step).choice(w, C.count, replace=False, shuffle=False)
        at = torch.from_numpy(drawn).sort().values + w * torch.arange(n)[:, None]
        at = at.clamp(max=P).to(theta.device)  # (n, m); P means no column
        x = block.params.to(theta.dtype)
        payload = C.encode(pad(x - theta, (0, 1))[:, at].flatten(0, 1).to(block.params.dtype))

        def decode(messages: Tensor) -> Tensor:
            return C.decode(*from_bytes(messages, payload)).to(theta.dtype)

        def serve(row: int, k: int, mean: Tensor) -> Tensor:
            total, real = mean + pad(servers[row], (0, 1))[at[k]], at[k] < P
            answer = as_bytes(C.encode(total[None].to(block.params.dtype)))
            servers[row, at[k][real]] = (total - decode(answer)[0])[real]
            return answer[0]

        messages = as_bytes(payload)
        answers = through_shards(fleet.comm, messages.unflatten(0, (len(x), n)), decode, serve)
        sent, d = pad(torch.zeros_like(x), (0, 1)), pad(torch.zeros_like(theta), (0, 1))
        sent[:, at.flatten()] = decode(messages).view(len(x), -1)
        d[at.flatten()] = decode(answers).flatten()
        block.params.copy_(x - sent[:, :P] + d[:P])
        theta.add_(d[:P])

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [self.shared_state[f"theta.{b}"].to(block.params.dtype) for b, block in enumerate(fleet.blocks)]


class CocktailSGDStrategy(CommunicateOptimizeStrategy):
    """CocktailSGD: at every step nodes send the largest of a random share of their differences, in few bits.

    Use it to fine-tune with AdamW on slow links; received bytes do not grow with N.

        q_i = Q(theta_i - theta);   d = Q(mean_i q_i + s);   s <- mean_i q_i + s - d
        theta_i <- theta_i - q_i + d;   theta <- theta + d

    theta are the common parameters, which evaluation uses, and theta_i node i's, which take local steps. Q is the
    compressor, on entries drawn anew at each step, and s is the error of the node that serves an entry.

    Payload: (1 + 1/N) p P (1 + topk (bits + 32 / bucket)) / 8 bytes per node and step, for P parameters and N nodes.

    Args:
        p: the share of the entries that are drawn at a step, over 0 and at most 1.
        topk: the share of the drawn entries that a node sends, over 0 and at most 1.
        bits: bits per sent value, 2 to 8 or 16. None sends exact values.
        bucket: number of values that share a scale.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. Clipping acts on each node's
            own gradient.

    >>> strategy = CocktailSGDStrategy("adamw", p=0.1, topk=0.2, bits=4, lr=1e-3)
    """

    name, title, paper, ranges = "cocktail", "CocktailSGD", "ICML 2023", ()
    tried = ()
    payload = "(N + 1) (ceil(p P / N / 8) + ceil(topk P p / N bits / 8) + 4 ceil(topk P p / N / bucket))"
    equation = "q_i = Q(theta_i - theta); d = Q(mean_i q_i + s); theta_i <- theta_i - q_i + d; theta <- theta + d"
    needs = "all nodes, every step; by default 1/160 of DDP's bytes"
    identities = ("p=1, topk=1, bits=None = fedavg with H=1", "N=1 = inner optimizer", "keeps mean_i theta_i + s")

    def __init__(
        self,
        inner_optim: Any = "adamw",
        *,
        p: float = 0.1,
        topk: float = 0.2,
        bits: int | None = 4,
        bucket: int = 128,
        **options: Unpack[InnerOptions],
    ):
        super().__init__(inner_optim, [CocktailCommunicator(p, topk, bits, bucket)], **options)
