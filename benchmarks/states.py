"""What optimizer state in blocks and delayed group updates cost and save, on a small GPT and a quadratic.

    python benchmarks/states.py states           # loss, bytes and time of each precision against torch's AdamW
    python benchmarks/states.py dgr              # delayed groups with and without compensation; docs/images/dgr.png
    python benchmarks/states.py long             # the GPT in G groups for G times the steps: as many updates as plain
    python benchmarks/states.py noise            # the error of the update that each precision makes

CPU, one thread, plain torch. The GPT learns to predict a synthetic language: a random Markov chain.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.dgr import DelayedGroups, groups_by_connectivity
from megatron_adacc.optim.reorganise import apply, propose

CONSOLE = Console()
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "dgr.png"
VOCABULARY = 64


class Gpt(nn.Module):
    """A decoder: learned positions, pre-norm, GELU, tied embeddings."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embedding.weight.t()


class Block(nn.Module):
    """Attention of heads of 32, then an MLP of four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, width // 32, 32).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.before_mlp(x))))


class Language:
    """A Markov chain: what follows depends on the last token and on whether the one before was odd."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = 2.5 * torch.randn(2, VOCABULARY, VOCABULARY, generator=generator)
        self._successors = logits.softmax(-1)

    def batch(self, size: int, length: int, seed: int) -> Tensor:
        """int64 [size, length + 1]."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
        for place in range(2, length + 1):
            chances = self._successors[tokens[:, place - 2] % 2, tokens[:, place - 1]]
            tokens[:, place] = torch.multinomial(chances, 1, generator=generator).squeeze(1)
        return tokens


@dataclass
class Run:
    """What a training gave.

    Attributes:
        losses: of each step, before its update.
        step_seconds: of forward, backward and update; optimizer_seconds of the update alone.
        validation: mean loss on held-out sequences at the end.
    """

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    optimizer_seconds: list[float] = field(default_factory=list)
    validation: float = math.nan


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Tensor],
    held_out: Tensor,
    lr: float,
    update: Callable[[], object] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> Run:
    """Train over the batches: 10 % linear warm-up, cosine to a tenth, norms clipped at 1."""
    run = Run()
    warmup = max(1, len(batches) // 10)
    for step, tokens in enumerate(batches):
        progress = max(0, step - warmup) / max(1, len(batches) - warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * progress))
        begun = time.process_time()
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        between = time.process_time()
        (update or optimizer.step)()
        ended = time.process_time()
        run.losses.append(float(loss.detach()))
        run.step_seconds.append(ended - begun)
        run.optimizer_seconds.append(ended - between)
        if after_step is not None:
            after_step(step)
    with torch.no_grad():
        run.validation = float(loss_of(model, held_out))
    return run


# ---- precisions ----


def states(options: argparse.Namespace) -> None:
    """AdamW against BlockAdamW of each precision: same start, same data."""
    language = Language()
    batches = [language.batch(options.batch, options.length, seed) for seed in range(options.steps)]
    held_out = language.batch(64, options.length, 10**6)
    table = Table(title=f"small GPT, {options.steps} steps, {options.seeds} seeds")
    for column in ("state", "bytes a parameter", "held-out loss", "optimizer ns/param", "step, of AdamW's"):
        table.add_column(column, justify="right")
    baseline = math.nan
    for name in options.kinds.split(","):
        runs = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            model = Gpt(options.layers, options.width, options.length)
            numel = sum(parameter.numel() for parameter in model.parameters())
            optimizer, after_step = _optimizer(name, model, numel, options)
            runs.append(train(model, optimizer, batches, held_out, options.lr, after_step=after_step))
        bytes_each = _state_bytes(optimizer) / numel
        # The first steps compile; the fastest are what the machine's other work disturbed least.
        fastest = min(_low(run.step_seconds) for run in runs)
        baseline = fastest if name == "adamw" else baseline
        optimizer_ns = min(_low(run.optimizer_seconds) for run in runs) / numel * 1e9
        losses = [run.validation for run in runs]
        table.add_row(
            name,
            f"{bytes_each:.3f}",
            f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})",
            f"{optimizer_ns:.1f}",
            f"{fastest / baseline:.3f}",
        )
        CONSOLE.print(f"{name}: {losses}, {bytes_each:.3f} bytes, {optimizer_ns:.1f} ns, {fastest * 1e3:.1f} ms a step")
    CONSOLE.print(f"{numel} parameters, batch {options.batch} x {options.length}")
    CONSOLE.print(table)


def _optimizer(
    name: str, model: nn.Module, numel: int, options: argparse.Namespace
) -> tuple[torch.optim.Optimizer, Callable[[int], None] | None]:
    common = {"lr": options.lr, "betas": (0.9, options.beta2), "weight_decay": 0.1}
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), **common), None
    kind, _, rounding = name.partition("-")
    own = {"rounding": rounding or "stochastic", "implementation": options.implementation}
    if kind != "mixed":
        return BlockAdamW(model.parameters(), bits=int(kind), **own, **common), None
    optimizer = BlockAdamW(model.parameters(), bits=8, **own, **common)
    named = dict(model.named_parameters())

    def reorganise(step: int) -> None:
        if step + 1 in (20, 50, 100, 200, 400):
            apply(optimizer, propose(optimizer, named, int(numel * options.mixed_bytes)))

    return optimizer, reorganise


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step"
    )


def _low(seconds: list[float]) -> float:
    """The lower decile without the first tenth of steps."""
    ordered = sorted(seconds[len(seconds) // 10 :])
    return ordered[len(ordered) // 10]


# ---- delayed groups ----


def quadratic(count: int, compensation: float, lr: float, noise: float, steps: int, seed: int = 0) -> list[float]:
    """Losses of SGD on a quadratic of 64 dimensions and condition 100, in `count` groups."""
    torch.manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))
    hessian = basis @ torch.diag(torch.logspace(0, -2, 64, dtype=torch.float64)) @ basis.t()
    weights = [nn.Parameter(torch.ones(64 // count, dtype=torch.float64)) for _ in range(count)]
    optimizer = torch.optim.SGD(weights, lr=lr)
    delayed = DelayedGroups(optimizer, [[weight] for weight in weights], compensation=compensation)
    losses = []
    for _ in range(steps):
        vector = torch.cat([weight.detach() for weight in weights])
        losses.append(float(0.5 * vector @ hessian @ vector))
        gradient = hessian @ vector + noise * torch.randn(64, dtype=torch.float64)
        for weight, part in zip(weights, gradient.split(64 // count), strict=True):
            weight.grad = part.clone()
        delayed.step()
        if not losses[-1] < 1e12:
            break
    return losses


def gpt_losses(count: int, compensation: float, options: argparse.Namespace, seed: int) -> Run:
    """The small GPT with AdamW in `count` groups, at the learning rate of the plain one."""
    language = Language()
    steps = options.steps * (count if options.what == "long" else 1)
    batches = [language.batch(options.batch, options.length, 1000 + step) for step in range(steps)]
    torch.manual_seed(seed)
    model = Gpt(options.layers, options.width, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, options.beta2), weight_decay=0.1)
    groups = groups_by_connectivity(model.named_parameters(), count)
    delayed = DelayedGroups(optimizer, groups, compensation=compensation)
    return train(model, optimizer, batches, language.batch(64, options.length, 10**6), options.lr, delayed.step)


def dgr(options: argparse.Namespace) -> None:
    """Losses at G = 1, 2, 4, 8, with and without compensation, as a table and a picture."""
    counts = (1, 2, 4, 8)
    strengths = [float(value) for value in options.compensations.split(",")]
    table = Table(title="mean loss of the last 50 steps, quadratic")
    for column in ("G", "lr", "noise", *(f"lambda {strength:g}" for strength in strengths)):
        table.add_column(column, justify="right")
    for lr, noise in ((1.0, 0.0), (1.9, 0.1), (4.0, 0.1)):
        for count in counts[1:]:
            ends = [_end(quadratic(count, strength, lr, noise, 800)) for strength in strengths]
            table.add_row(str(count), f"{lr:g}", f"{noise:g}", *ends)
    CONSOLE.print(table)
    curves: dict[tuple[int, float], list[float]] = {}
    table = Table(title=f"held-out loss of the small GPT after {options.steps} steps, AdamW")
    for column in ("G", *(f"lambda {strength:g}" for strength in strengths)):
        table.add_column(column, justify="right")
    for count in counts:
        row = []
        for strength in strengths if count > 1 else strengths[:1]:
            runs = [gpt_losses(count, strength, options, seed) for seed in range(options.seeds)]
            curves[count, strength] = [statistics.mean(each) for each in zip(*(r.losses for r in runs), strict=True)]
            row.append(f"{statistics.mean(run.validation for run in runs):.4f}")
        CONSOLE.print(count, row)
        table.add_row(str(count), *row)
    CONSOLE.print(table)
    draw(curves, strengths)


def long(options: argparse.Namespace) -> None:
    """Held-out losses where every parameter gets as many updates as with the plain optimizer."""
    for count in (1, 2, 4, 8):
        strength = float(options.compensations.split(",")[-1])
        losses = [gpt_losses(count, strength, options, seed).validation for seed in range(options.seeds)]
        CONSOLE.print(
            f"G = {count}, lambda = {strength:g}, {options.steps * count} steps: {statistics.mean(losses):.4f}"
        )


def _end(losses: list[float]) -> str:
    return "diverges" if not losses[-1] < 1e12 else f"{statistics.mean(losses[-50:]):.3g}"


def draw(curves: dict[tuple[int, float], list[float]], strengths: list[float]) -> None:
    """Left: the quadratic beyond and below its stable rate. Right: the GPT's training loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.4), constrained_layout=True)
    colours = {1: "0.4", 2: "tab:blue", 4: "tab:orange", 8: "tab:red"}
    strongest = strengths[-1]
    for axis, lr in ((left, 1.9), (middle, 4.0)):
        for count in (2, 4, 8):
            for strength, style in ((0.0, "--"), (strongest, "-")):
                losses = quadratic(count, strength, lr, 0.1, 800)
                label = f"G = {count}, lambda = {strength:g}"
                axis.semilogy(_smooth(losses, 20), style, color=colours[count], label=label, linewidth=1.2)
        axis.set(xlabel="step", ylabel="loss", title=f"quadratic with noise, SGD, lr = {lr:g}")
        axis.grid(alpha=0.3)
    left.plot(_smooth(quadratic(1, 0.0, 1.9, 0.1, 800), 20), color=colours[1], label="G = 1", linewidth=1.2)
    middle.set_ylim(1e-2, 1e4)
    for (count, strength), losses in curves.items():
        if strength in (0.0, strongest):
            label = "G = 1" if count == 1 else f"G = {count}, lambda = {strength:g}"
            style = "--" if strength == 0.0 and count > 1 else "-"
            right.plot(_smooth(losses, 20), style, color=colours[count], label=label, linewidth=1.2)
    right.set(xlabel="step", ylabel="training loss", title="small GPT, AdamW")
    right.grid(alpha=0.3)
    for axis in (left, middle, right):
        axis.legend(fontsize=7)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    CONSOLE.print(f"written: {PICTURE}")


def _smooth(values: list[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


# ---- noise ----


def noise(_: argparse.Namespace) -> None:
    """Stationary error of s and of the update, by precision and rounding: gradients of constant variance."""
    table = Table(title="beta2 0.99, 400 steps of normal gradients, against AdamW")
    for column in ("bits", "rounding", "mean of v", "deviation of s", "error of u, of u"):
        table.add_column(column, justify="right")
    for bits in (16, 8, 4):
        for rounding in ("stochastic", "nearest"):
            torch.manual_seed(0)
            scale = torch.exp(0.5 * torch.randn(64 * 256))
            ours, theirs = nn.Parameter(torch.zeros(64 * 256)), nn.Parameter(torch.zeros(64 * 256))
            optimizer = BlockAdamW([ours], 0.0, (0.9, 0.99), bits=bits, rounding=rounding, implementation="torch")
            reference = torch.optim.AdamW([theirs], 0.0, (0.9, 0.99))
            for _ in range(400):
                ours.grad = scale * torch.randn(64 * 256)
                theirs.grad = ours.grad.clone()
                optimizer.step()
                reference.step()
            m, v = optimizer.moments(ours)
            true_m, true_v = reference.state[theirs]["exp_avg"], reference.state[theirs]["exp_avg_sq"]
            error = m / v.sqrt() - true_m / true_v.sqrt()
            table.add_row(
                str(bits),
                rounding,
                f"{float((v / true_v).mean()):.4f}",
                f"{float((v / true_v).sqrt().std()):.4f}",
                f"{float(error.norm() / (true_m / true_v.sqrt()).norm()):.4f}",
            )
    CONSOLE.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["states", "dgr", "long", "noise"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--beta2", type=float, default=0.99)
    parser.add_argument("--mixed-bytes", type=float, default=1.6, help="limit of 'mixed', bytes of m and v a parameter")
    parser.add_argument("--kinds", default="adamw,32,16,8,4,mixed,8-nearest,4-nearest")
    parser.add_argument("--compensations", default="0,1,10")
    parser.add_argument("--implementation", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"states": states, "dgr": dgr, "long": long, "noise": noise}[options.what](options)


if __name__ == "__main__":
    main()
