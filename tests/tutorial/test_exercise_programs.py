"""Exercises that begin with a program: their solutions are right, and checks name what a reader may change wrongly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from ranks import run_ranks

from ddp.__main__ import main
from ddp.train.reports.profile import PARTS, Part, Profile, read_profile
from recipes.tutorial.tools import bottleneck_checks, exercise, holes, precision_checks
from recipes.tutorial.tools.holes import name_of
from recipes.tutorial.tools.mistake import Mistake


class Typical(NamedTuple):
    """A mistake that a reader may make: lines of the solution, what stands there instead, and what must be said."""

    program: str
    right: str
    wrong: str
    says: str


SOLUTIONS = {  # lines of the program to begin with, and what stands there in a solution
    "memory": [
        ("from torch import Tensor\n", "from contextlib import nullcontext\nfrom torch import Tensor\n"),
        (
            '    loss_sum = F.cross_entropy(model(inputs), classes, reduction="sum")\n'
            "    (loss_sum * model.comm.world_size / num_samples).backward()\n",
            "    parts = list(zip(inputs.split(most), classes.split(most), strict=True))\n"
            "    for number, (some, theirs) in enumerate(parts, 1):\n"
            "        with nullcontext() if number == len(parts) else model.no_sync():\n"
            '            loss_sum = F.cross_entropy(model(some), theirs, reduction="sum")\n'
            "            (loss_sum * model.comm.world_size / num_samples).backward()\n",
        ),
    ],
    "precision": [
        (
            "    losses = []\n",
            "    losses, narrow = [], dict(bf16=torch.bfloat16, fp16=torch.float16).get(precision)\n"
            '    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")\n',
        ),
        (
            "        loss = F.cross_entropy(replica(inputs), classes)\n        loss.backward()\n",
            '        with torch.autocast("cpu", dtype=narrow, enabled=narrow is not None):\n'
            "            loss = F.cross_entropy(replica(inputs), classes)\n"
            "        scaler.scale(loss).backward()\n"
            "        scaler.unscale_(optimizer)\n",
        ),
        ("        optimizer.step()\n", "        scaler.step(optimizer)\n        scaler.update()\n"),
    ],
}
FORWARD = '            loss_sum = F.cross_entropy(model(some), theirs, reduction="sum")\n'
SCALED = "(loss_sum * model.comm.world_size / num_samples)"
AUTOCAST = '        with torch.autocast("cpu", dtype=narrow, enabled=narrow is not None):\n'
LOSS = "            loss = F.cross_entropy(replica(inputs), classes)\n"
CLIP = "        nn.utils.clip_grad_norm_(replica.parameters(), MOST_NORM)\n"
UPDATE = "        scaler.step(optimizer)\n        scaler.update()\n"
UNSCALE = "        scaler.unscale_(optimizer)\n"
CHANGED_WRONGLY = {
    "memory: nothing": Typical(
        "memory",
        "inputs.split(most), classes.split(most)",
        "inputs.split(99), classes.split(99)",
        "step 1, rank 0: a forward takes 6 samples, and there is memory for 2\nhint: take micro-batches",
    ),
    "memory: chunks": Typical(
        "memory",
        "inputs.split(most), classes.split(most)",
        "inputs.chunk(2), classes.chunk(2)",
        "step 1, rank 0: a forward takes 3 samples, and there is memory for 2",
    ),
    "memory: whole ones alone": Typical(
        "memory",
        "enumerate(parts, 1)",
        "enumerate(parts[: len(inputs) // most], 1)",
        "the forwards take 6 samples, and the share has 7\nhint: the last micro-batch may be smaller",
    ),
    "memory: one backward": Typical(
        "memory",
        FORWARD + f"            {SCALED}.backward()\n",
        FORWARD.replace("loss_sum = ", "loss_sum = (loss_sum if number > 1 else 0) + ")
        + "    (loss_sum * model.comm.world_size / num_samples).backward()\n",
        "the graphs of several micro-batches are in memory at once\nhint: call backward for each micro-batch",
    ),
    "memory: an update for each": Typical(
        "memory",
        "    optimizer.step()",
        "        optimizer.step()",
        "3 updates, expected 1\nhint: call optimizer.step() once",
    ),
    "memory: no update": Typical("memory", "    optimizer.step()\n", "", "0 updates, expected 1\nhint: call optimizer"),
    "memory: another rate": Typical(
        "memory",
        "    optimizer.step()",
        "    optimizer.param_groups[0]['lr'] = 0.1 / len(parts)\n    optimizer.step()",
        "the update is at the rate 0.0333333, expected 0.1\nhint: leave the rate alone",
    ),
    "memory: each is sent": Typical(
        "memory",
        "nullcontext() if number == len(parts) else model.no_sync()",
        "nullcontext()",
        "2 all-reduces before the last micro-batch, expected none\nhint: all micro-batches but the last one",
    ),
    "memory: the forward outside": Typical(
        "memory",
        "        with nullcontext() if number == len(parts) else model.no_sync():\n" + FORWARD,
        FORWARD[4:] + "        with nullcontext() if number == len(parts) else model.no_sync():\n",
        "2 all-reduces before the last micro-batch, expected none\nhint: all micro-batches but the last one",
    ),
    "memory: none is sent": Typical(
        "memory",
        "nullcontext() if number == len(parts) else model.no_sync()",
        "model.no_sync()",
        "the 67 numbers of the gradients are not sent\nhint: the last micro-batch stands outside of no_sync",
    ),
    "memory: sent once more": Typical(
        "memory",
        "    optimizer.step()",
        "    for each in model.parameters():\n        model.comm.all_reduce(each.grad, 'mean')\n    optimizer.step()",
        "150 numbers are sent, where 83 are enough\nhint: the replica has averaged the gradients already",
    ),
    "memory: zero_grad inside": Typical(
        "memory", FORWARD, f"            optimizer.zero_grad()\n{FORWARD}", "hint: only the last micro-batch is in it"
    ),
    "memory: no zero_grad": Typical(
        "memory", "    optimizer.zero_grad()\n", "", "hint: the gradient of the step before is still in it"
    ),
    "memory: means added up": Typical(
        "memory", SCALED, "(loss_sum / len(some))", "hint: means of micro-batches are added up"
    ),
    "memory: mean of means": Typical(
        "memory",
        SCALED,
        "(loss_sum / len(some) / len(parts))",
        "shares of 7 and 5 samples, 3 at a time: step 1, rank 0: the gradient is [-0.0531, 0.07662, 0.04477, …], that "
        "of the whole batch [-0.02298, 0.09203, 0.03962, …]\nhint: a mean of the micro-batches' means",
    ),
    "memory: mean of ranks' means": Typical(
        "memory", SCALED, "(loss_sum / len(inputs))", "hint: a mean of the ranks' means, although their shares differ"
    ),
    "memory: no division": Typical("memory", SCALED, "loss_sum", "hint: a sum: nothing has divided it by num_samples"),
    "memory: the replica divides, too": Typical(
        "memory", SCALED, "(loss_sum / num_samples)", "hint: divided by the number of ranks twice"
    ),
    "memory: two divisions": Typical(
        "memory", "/ num_samples)", "/ num_samples / len(parts))", "hint: divided by the number of micro-batches as"
    ),
    "precision: nothing": Typical(
        "precision",
        "enabled=narrow is not None",
        "enabled=False",
        "bf16, rank 0, step 1: layers compute in float32, expected bfloat16\nhint: `with torch.autocast(",
    ),
    "precision: always narrow": Typical(
        "precision",
        "enabled=narrow is not None",
        "enabled=True",
        "fp32, rank 0, step 1: computes in bfloat16\nhint: leave what `train` does in full precision",
    ),
    "precision: a narrow model": Typical(
        "precision",
        "Parallel(net(), comm",
        "Parallel(net().to(torch.bfloat16 if precision == 'bf16' else None), comm",
        "bf16, rank 0, step 1: the optimizer updates bfloat16 parameters, expected float32\nhint: a bfloat16 weight is",
    ),
    "precision: narrow inputs": Typical(
        "precision",
        "replica(inputs)",
        "replica(inputs.to(narrow))",
        "bf16, rank 0, step 1: other inputs than in full precision\nhint: `with torch.autocast(",
    ),
    "precision: other samples": Typical(
        "precision",
        "in batches(comm.rank, comm.world_size):",
        "in batches(comm.rank ^ (precision == 'bf16'), comm.world_size):",
        "bf16, rank 0, step 1: other inputs than in full precision\nhint: the comparison is of precisions",
    ),
    "precision: other weights": Typical(
        "precision",
        "manual_seed(0)",
        "manual_seed(torch.seed())",
        "fp32 again, rank 0: begins with other weights than the first time\nhint: draw the first weights from",
    ),
    "precision: fewer steps": Typical(
        "precision",
        "        losses.append(loss.item())\n",
        "        losses.append(loss.item())\n        if narrow and len(losses) == 9:\n            break\n",
        "bf16, rank 0: 9 steps, in full precision 12",
    ),
    "precision: a narrow loss": Typical(
        "precision",
        LOSS,
        LOSS.replace("replica(inputs), classes)", "replica(inputs), classes).to(narrow or torch.float32)"),
        "bf16, rank 0, step 1: the loss is bfloat16, expected float32\nhint: compute the loss inside of autocast",
    ),
    "precision: the loss outside": Typical(
        "precision",
        LOSS,
        "            outputs = replica(inputs)\n        loss = F.cross_entropy(outputs, classes)\n",
        "bf16, rank 0, step 1: the loss is bfloat16, expected float32\nhint: compute the loss inside of autocast",
    ),
    "precision: backward inside": Typical(
        "precision",
        "        scaler.scale(loss)",
        "            scaler.scale(loss)",
        "bf16, rank 0, step 1: backward is called under autocast\nhint: end the block before backward",
    ),
    "precision: narrow sums": Typical(
        "precision",
        "comm=comm)",
        "comm=comm, wire='bf16' if precision == 'bf16' else None)",
        "bf16, rank 0, step 1: gradients are added up over ranks as bf16, expected float32\n"
        "hint: the sums over ranks are of float32",
    ),
    "precision: clipped in fp32 alone": Typical(
        "precision",
        CLIP,
        f"        if not narrow:\n    {CLIP}",
        "bf16, rank 0, step 1: the optimizer finds a gradient of length 1.04, in full precision 0.3; they are "
        "248% apart\nhint: clip in every precision",
    ),
    "precision: not scaled": Typical(
        "precision",
        f"        scaler.scale(loss).backward()\n{UNSCALE}{CLIP}{UPDATE}",
        f"        loss.backward()\n{CLIP}        optimizer.step()\n",
        "fp16, rank 0: the loss is not scaled, so small gradients become zero in float16\nhint: one torch.amp",
    ),
    "precision: clipped while scaled": Typical(
        "precision",
        UNSCALE + CLIP,
        CLIP + UNSCALE,
        "fp16, rank 0, step 1: the optimizer finds a gradient of length 4.58e-06, in full precision 0.3\n"
        "hint: clipped before it was unscaled: one torch.amp.GradScaler",
    ),
    "precision: never unscaled": Typical(
        "precision",
        f"{UNSCALE}{CLIP}{UPDATE}",
        "        optimizer.step()\n",
        "fp16, rank 0, step 1: the optimizer finds a gradient of length 6.84e+04, in full precision 0.3\n"
        "hint: never unscaled: one torch.amp.GradScaler",
    ),
    "precision: returns what is scaled": Typical(
        "precision",
        "losses.append(loss.item())",
        "losses.append(scaler.scale(loss).item())",
        "fp16, rank 0: returned the loss 6.05e+04, in full precision 0.9232\nhint: return the loss as it is",
    ),
    "precision: too large a scale": Typical(
        "precision",
        '"cpu", enabled',
        '"cpu", init_scale=2.0**30, enabled',
        "fp16, rank 0, step 1: the optimizer was not called\nhint: call it in every step",
    ),
    "precision: the update is made": Typical(
        "precision",
        UPDATE,
        "        optimizer.step()\n        scaler.__init__('cpu', enabled=precision == 'fp16')\n",
        "fp16, the gradients of step 5 overflow on rank 1: rank 0 makes the update\nhint: an update from infinite",
    ),
    "precision: the scale stays": Typical(
        "precision",
        "        scaler.update()\n",
        "        scaler.update(65536.0)\n",
        "fp16, the gradients of step 5 overflow on rank 1: the scale of rank 0 is 65,536 before, and 65,536 after\n"
        "hint: scaler.update() makes it smaller",
    ),
    "precision: ends at the overflow": Typical(
        "precision",
        "        losses.append(loss.item())\n",
        "        losses.append(loss.item())\n        if scaler.is_enabled() and scaler.get_scale() < 65536:\n"
        "            break\n",
        "fp16, the gradients of step 5 overflow on rank 1: rank 0 ends after 5 steps\nhint: leave out that",
    ),
    "precision: no number": Typical("precision", "loss.item()", "None", "fp32: train returns no list of 12 losses"),
    "precision: one loss": Typical(
        "precision", "return losses", "return losses[-1]", "fp32: train returns no list of 12 losses"
    ),
}

RIGHT_AS_WELL = {  # lines of the solution, and what others write there
    "memory": [
        ("model(some)", "model(input=some)"),
        ("    optimizer.step()\n", "    optimizer.step()\n    with torch.no_grad():\n        model(inputs)\n"),
        ("from torch import Tensor\n", "import torch\nfrom torch import Tensor\n"),
    ],
    "precision": [
        ("F.cross_entropy(replica(inputs), classes)", "nn.CrossEntropyLoss()(replica(inputs)[0], classes)"),
        ("Parallel(net()", "Parallel(Pair(net())"),
        (
            "def train(",
            "class Pair(nn.Sequential):\n    def forward(self, input):\n        return super().forward(input), 1\n\n\n"
            "def train(",
        ),
        ("momentum=0.9)", "momentum=0.9, fused=True)"),
        ("scaler.scale(loss).backward()", "backward(loss, scaler.scale(torch.ones(())))"),
        ("from torch.nn import", "from torch.autograd import backward\nfrom torch.nn import"),
        (
            "        losses.append(loss.item())\n",
            "        losses.append(loss.detach())\n        with torch.no_grad():\n            replica(input=inputs)\n",
        ),
    ],
}


# --- what is slow ----------------------------------------------------------------------------------------------------

WAVES = "torch.stack([torch.arange(WIDTH).mul((term + 1) / WIDTH).sin() for term in range(TERMS)]).mean(0)"
MENDS = {  # by the size that makes the program slow: lines of it, and what stands there once it is mended
    "LOOKED_AT": [
        ("        largest = max(row.abs().max().item() for row in self.raw[:LOOKED_AT])\n", ""),
        ("/ largest", "/ self.largest"),
        ("    def __len__", "        self.largest = self.raw[:LOOKED_AT].abs().max().item()\n\n    def __len__"),
    ],
    "TERMS": [
        ("        shift = torch.stack(waves).mean(0)\n", ""),
        ("        waves = [torch.arange(WIDTH).mul((term + 1) / WIDTH).sin() for term in range(TERMS)]\n", ""),
        ("+ shift", "+ self.shift"),
        ("        self.seen: list[list[float]] = []\n", f"        self.seen, self.shift = [], {WAVES}\n"),
    ],
    "GROUP": [
        ("        for group in means.split(GROUP):\n", ""),
        ('            comm.all_reduce(group, "mean")\n', '        comm.all_reduce(means, "mean")\n'),
    ],
    "PIECE": [
        (
            "                pieces = zip(parameter.view(-1).split(PIECE), parameter.grad.view(-1).split(PIECE), "
            "strict=True)\n"
            "                for piece, gradient in pieces:\n"
            '                    piece.sub_(gradient.mul(group["lr"]))\n',
            "                parameter.add_(parameter.grad, alpha=-group['lr'])\n",  # as torch's own SGD does
        ),
    ],
    "LOGGED": [
        (
            "self.seen.append([piece.abs().max().item() for piece in pieces])",
            "self.seen.append(self.stem.weight.detach().view(-1, LOGGED).abs().amax(1).tolist())",
        ),
    ],
}
SEED = {  # the first that makes it slow by this size
    name: next(seed for seed in range(100) if bottleneck_checks.drawn(seed).sizes[name] in much)
    for name, (_, much, _) in bottleneck_checks.SIZES.items()
}


def mended(name: str, seed: int) -> str:
    """Returns the program that a seed draws, mended for one size."""
    return with_changes(bottleneck_checks.text_of(seed), MENDS[name])


class Ran(NamedTuple):
    """Holds what the ranks have found of programs, by name, and profiles of the slow ones."""

    found: dict[str, list[bottleneck_checks.Found]]
    profiles: dict[str, Profile]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs each program slow and mended, and three that fail, all of them on the same two ranks."""
    folder = tmp_path_factory.mktemp("bottleneck")
    texts = {f"{name}, slow": bottleneck_checks.text_of(SEED[name]) for name in MENDS}
    texts |= {f"{name}, mended": mended(name, SEED[name]) for name in MENDS}
    texts["no fit"] = texts["PIECE, slow"].replace("    ddp.fit(", "    return []\n    ddp.fit(")
    texts["an exit"] = texts["PIECE, slow"].replace("model = Net()", "raise SystemExit(3)")
    texts["an error"] = texts["PIECE, slow"].replace("model = Net()", "model = Nett()")
    paths = [folder / f"program-{number}.py" for number in range(len(texts))]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    ranks = run_ranks(bottleneck_checks.as_rank, bottleneck_checks.NUM_RANKS, paths, folder, len(MENDS), timeout_s=300)
    found = dict(zip(texts, map(list, zip(*ranks, strict=True)), strict=True))
    return Ran(found, {name: read_profile(folder / str(number)) for number, name in enumerate(MENDS)})


@pytest.mark.parametrize("name", MENDS)
@pytest.mark.slow
def test_the_profile_names_what_was_drawn_and_mending_it_is_faster(name: str, ran: Ran) -> None:
    truth, profile = bottleneck_checks.drawn(SEED[name]), ran.profiles[name]
    busy = [rank for rank in range(2) if truth.rank in (None, rank)]
    parts = {part: bottleneck_checks.shares(profile, part) for part in PARTS if part != "wait"}
    assert max(parts, key=lambda part: sum(parts[part][rank] for rank in busy)) == truth.part
    if truth.rank is not None:
        waits = bottleneck_checks.shares(profile, "wait")
        assert waits[1 - truth.rank] > waits[truth.rank]
    slow, fast = ran.found[f"{name}, slow"], ran.found[f"{name}, mended"]
    assert not any(found.mistake for found in [*slow, *fast])
    said = [
        *bottleneck_checks.judged_name(truth.part, truth.rank, truth, profile),
        *bottleneck_checks.judged_mended(slow, fast, truth.part),
    ]
    assert len(said) == 3 and said[0].startswith(f"what is slow: {truth.part} takes a rank ")


@pytest.mark.parametrize(
    ("part", "rank", "says"),
    [
        ("wait", 1, "hint: a rank that waits is not slow: whom does it wait for"),
        ("data", 1, "hint: profile it, and look for what is longest on the rank that waits least"),
        ("forward", None, "and RANK is None\nhint: do both ranks take long there"),
        ("forward", 0, "and RANK is 0\nhint: do both ranks take long there"),
    ],
)
def test_a_wrong_part_or_rank_is_refused(part: Part, rank: int | None, says: str, ran: Ran) -> None:
    truth = bottleneck_checks.Drawn({}, "forward", 1)
    with pytest.raises(Mistake) as found:
        list(bottleneck_checks.judged_name(part, rank, truth, ran.profiles["LOGGED"]))
    assert says in str(found.value) and f"{part} takes a rank " in str(found.value)


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        (lambda found: found, "calls of functions, and made "),
        (lambda found: found._replace(losses=(*found.losses[:5], 0.5)), "rank 1: the loss of step 6 is 0.5, and was "),
        (
            lambda found: found._replace(weights=found.weights + 1e-7),
            "rank 1: the last weights are not the same, bit by bit\nhint: the same numbers in less time",
        ),
        (
            lambda found: found._replace(written=found.written[1:]),
            "rank 1: train returns something else than before\nhint: what is written down, too",
        ),
    ],
)
def test_a_program_that_is_mended_wrongly_is_refused(
    differs: Callable[[bottleneck_checks.Found], bottleneck_checks.Found], says: str, ran: Ran
) -> None:
    slow = ran.found["PIECE, slow"]
    with pytest.raises(Mistake) as found:
        list(bottleneck_checks.judged_mended(slow, [slow[0], differs(slow[1])], "update"))
    assert says in str(found.value)


def test_a_program_that_fails_says_where(ran: Ran) -> None:
    for rank in range(2):
        step, found, hint = ran.found["an error"][rank].mistake[:3]
        assert step == "the training runs" and not hint
        assert found.startswith("NameError: name 'Nett' is not defined\n  ")
        assert ", line " in found
        assert ran.found["an exit"][rank].mistake[1].startswith("SystemExit: 3\n  ")
        assert ran.found["no fit"][rank].mistake[1] == "train has not called ddp.fit"


@pytest.mark.slow
def test_a_bottleneck_is_drawn_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (holes, exercise):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(exercise.secrets, "randbelow", lambda _: SEED["LOGGED"])
    assert main(["exercise", "bottleneck", "--begin"]) == 0
    path = tmp_path / "bottleneck.py"
    assert path.read_text() == bottleneck_checks.text_of(SEED["LOGGED"])

    def says(text: str) -> str:
        path.write_text(text)
        try:
            main(["exercise", "bottleneck"])
        except SystemExit as ended:
            assert ended.code == 1
        return capsys.readouterr().out

    right = mended("LOGGED", SEED["LOGGED"])
    assert "✗ what is slow: PART is ''\nhint: write the part of the step that is slow, one of data, " in says(right)
    right = right.replace('PART = ""', 'PART = "forward"')
    assert "✗ what is slow: SEED is None\nhint: leave the number" in says(right.replace("SEED =", "SEED, MY = None,"))
    rank = bottleneck_checks.drawn(SEED["LOGGED"]).rank
    found = says(right.replace("RANK: int | None = None", f"RANK: int | None = {rank}"))
    assert found.count("✓ ") == 3 and "\nsolved; --begin draws another one, once this file is moved away\n" in found


# --- typical mistakes ------------------------------------------------------------------------------------------------


@cache
def solved(name: str) -> str:
    """Returns a solution."""
    return with_changes(exercise.text_of(name), SOLUTIONS[name])


def with_changes(text: str, changes: list[tuple[str, str]]) -> str:
    for right, changed in changes:
        assert text.count(right) == 1, "the program has changed"
        text = text.replace(right, changed)
    return text


def written(folder: Path, name: str, text: str) -> ModuleType:
    """Returns the reader's file, loaded."""
    path = folder / name_of(name)
    path.write_text(text, encoding="utf-8")
    return exercise.loaded(path, name)


@pytest.mark.parametrize("name", SOLUTIONS)
@pytest.mark.quick(1)
def test_a_program_is_right_once_it_is_changed(name: str, tmp_path: Path) -> None:
    assert len(list(exercise.CHECKS[name](written(tmp_path, name, solved(name))))) >= 4
    with pytest.raises(Mistake):
        list(exercise.CHECKS[name](written(tmp_path, name, exercise.text_of(name))))


@pytest.mark.parametrize("name", RIGHT_AS_WELL)
def test_what_others_write_is_right_as_well(name: str, tmp_path: Path) -> None:
    text = with_changes(solved(name), RIGHT_AS_WELL[name])
    assert len(list(exercise.CHECKS[name](written(tmp_path, name, text)))) >= 4


TRAINED = precision_checks._trained


@cache
def trained_by_the_solution(folder: Path, word: str, overflows: int | None) -> list[precision_checks.Training]:
    return TRAINED(written(folder, "precision", solved("precision")), word, overflows=overflows)


@pytest.fixture
def trains_what_differs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before the word in which a mistake is to be found has been trained by the solution, once."""
    folder = tmp_path_factory.getbasetemp()

    def trained(module: ModuleType, word: str, *, overflows: int | None = None) -> list[precision_checks.Training]:
        if module.finds == word and (overflows is not None) == module.overflows:
            return TRAINED(module, word, overflows=overflows)
        return trained_by_the_solution(folder, word, overflows)

    monkeypatch.setattr(precision_checks, "_trained", trained)


@pytest.mark.parametrize("name", CHANGED_WRONGLY)
@pytest.mark.quick(5)
def test_a_wrong_change_is_named(name: str, tmp_path: Path, trains_what_differs: None) -> None:
    program, right, wrong, says = CHANGED_WRONGLY[name]
    assert right in solved(program), "the solution has changed"
    module: Any = written(tmp_path, program, solved(program).replace(right, wrong))
    module.finds, module.overflows = says[:4], "overflow" in says
    with pytest.raises(Mistake) as found:
        list(exercise.CHECKS[program](module))
    assert says in str(found.value)
