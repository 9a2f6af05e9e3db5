"""LARS, LAMB and LARC against formulas in float64, against other programs' arithmetic, and as torch optimizers.

Tests: ddp/optim/layerwise.py, ddp/optim/norms.py.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn

from ddp.errors import ConfigError
from ddp.models import CNN
from ddp.optim import LAMB, LARC, LARS, layerwise, norms, parameter_groups
from ddp.optim.trust_ratio import LAMB_PRESETS, LARC_PRESETS, LARS_PRESETS, trust_ratios

KINDS = {"lamb": LAMB, "lars": LARS, "larc": LARC}
SHAPES = [(7, 5), (5,), (40, 30), (3, 4, 2, 2), (), (0,), (300, 9), (16,)]  # with blocks of 512, two large ones


def patch_blocks(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(layerwise, "BLOCK_NUMEL", numel)
    monkeypatch.setattr(layerwise, "STRETCH_NUMEL", 4 * numel)
    monkeypatch.setattr(norms, "BLOCK_NUMEL", numel)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_blocks(monkeypatch, 512)


def tensors(dtype: torch.dtype, *, scale: float = 1.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(scale).to(dtype) for shape in SHAPES]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    found = [nn.Parameter(tensor) for tensor in tensors(dtype)]
    with torch.no_grad():
        found[1].zero_()  # a bias
    return found


def in_groups(params: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    matrices = {"params": [p for p in params if p.dim() > 1], "weight_decay": decay}
    return [matrices, {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    """Gradients of a quadratic with noise, of other sizes in every tensor and step; none at all in some places."""
    for index, (p, noise) in enumerate(zip(params, tensors(p_dtype(params), seed=step + 1), strict=True)):
        p.grad = (p.detach() * 0.1 + noise) * 10.0 ** ((index + step) % 4 - 2)
        if index == 3 and step == 4:
            p.grad.zero_()


def p_dtype(params: list[nn.Parameter]) -> torch.dtype:
    return params[0].dtype


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "lamb": [
        *({"bias_correction": a, "grad_averaging": b} for a, b in itertools.product([True, False], repeat=2)),
        {"decay_in_ratio": False},
        {"norm_bounds": (0.5, 3.0)},
        {"max_ratio": 1.0},
        {"adapt": "with_decay"},
        {"adapt": "never"},
        {"clip_norm": 0.7},
        {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    ],
    "lars": [
        *({"nesterov": a, "rate_in_momentum": b} for a, b in itertools.product([True, False], repeat=2)),
        {"decay_in_ratio": False},
        {"norm_bounds": (0.5, 3.0)},
        {"adapt": "with_decay"},
        {"clip_norm": 0.7, "momentum": 0.0},
        {"eps": 0.1, "trust_coefficient": 0.05, "weight_decay": 0.1},
    ],
}
OPTIONS["larc"] = OPTIONS["lars"]
CASES = [(kind, option) for kind, options in OPTIONS.items() for option in options]


@pytest.mark.parametrize(("kind", "option"), CASES, ids=lambda value: str(value))
@pytest.mark.quick(4)
def test_equals_the_formulas_over_50_steps(kind: str, option: dict[str, Any]) -> None:
    equals_the_formulas(kind, option, maximize=False, num_steps=50)


@pytest.mark.parametrize(("kind", "option"), CASES, ids=lambda value: str(value))
def test_maximizes_by_the_formulas(kind: str, option: dict[str, Any]) -> None:
    equals_the_formulas(kind, option, maximize=True, num_steps=6)


def equals_the_formulas(kind: str, option: dict[str, Any], *, maximize: bool, num_steps: int) -> None:
    params = parameters()
    weights = [p.detach().numpy().copy() for p in params]
    presets: dict[str, Any] = {
        "lamb": LAMB_PRESETS["paper"],
        "lars": LARS_PRESETS["paper"],
        "larc": LARC_PRESETS["apex"],
    }
    choices = {**presets[kind], "weight_decay": 0.02, **option}
    decay = choices["weight_decay"]
    optimizer = KINDS[kind](in_groups(params, decay), lr=0.01, maximize=maximize, **choices)
    states: list[dict[str, Any]] = [{} for _ in params]
    rule = reference.lamb if kind == "lamb" else reference.lars
    largest = 0.0
    for step in range(num_steps):
        give_gradients(params, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + math.sin(step))  # changes, as rates in momentum must notice
        rates = {"lr": 0.01 * (1 + math.sin(step)), "larc": kind == "larc"}
        rates["decay"] = [decay if p.dim() > 1 else 0.0 for p in params]
        sign = -1 if maximize else 1
        rule(weights, [sign * p.grad.numpy() for p in params], states, step + 1, {**choices, **rates})
        optimizer.step()
        for p, w in zip(params, weights, strict=True):
            difference = np.abs(p.detach().numpy() - w).max(initial=0.0)
            largest = max(largest, float(difference / max(1e-3, np.abs(w).max(initial=0.0))))
    assert largest <= 1e-12


def test_the_ratio() -> None:
    ratios = trust_ratios(np.array([2.0, 0.0, 3.0, 0.0]), np.array([4.0, 5.0, 0.0, 0.0]))
    assert ratios.tolist() == [0.5, 1.0, 1.0, 1.0]
    bounded = trust_ratios(np.array([0.1, 20.0]), np.array([2.0, 2.0]), norm_bounds=(1.0, 10.0))
    assert bounded.tolist() == [0.5, 5.0]
    lars = trust_ratios(np.array([2.0]), np.array([1.0]), coefficient=0.5, weight_decay=0.25, eps=0.5)
    assert lars.tolist() == [0.5]


def other_program(name: str) -> tuple[Any, dict[str, Any]]:
    """Our optimizer with a preset, and the program that the preset is named after."""
    kind, preset = name.split()
    program = {
        "lamb paper": lambda w, g, s, t, n, d: reference.apex_lamb(
            w, g, s, t, lr=0.01, wd=0.01 * d, global_norm=0.0, use_nvlamb=True
        ),
        "lamb tfa": lambda w, g, s, t, n, d: reference.tfa_lamb(w, g, s, t, lr=0.01, wd=0.01, excluded=not d),
        "lamb mlperf": lambda w, g, s, t, n, d: reference.tfa_lamb(
            w, g / np.float32(max(1.0, n)), s, t, lr=0.01, wd=0.01, excluded=not d
        ),
        **{
            f"lamb {each}": lambda w, g, s, t, n, d, nv=each == "nvlamb": reference.apex_lamb(
                w, g, s, t, lr=0.01, wd=0.01 * d, global_norm=n, use_nvlamb=nv
            )
            for each in ("nvlamb", "apex", "timm")
        },
        "lars timm": lambda w, g, s, t, n, d: reference.timm_lars(w, g, s, t, lr=0.01, wd=0.01 * d, trust_clip=False),
        "larc timm": lambda w, g, s, t, n, d: reference.timm_lars(w, g, s, t, lr=0.01, wd=0.01 * d, trust_clip=True),
        "lars mlperf": lambda w, g, s, t, n, d: reference.mlperf_lars(w, g, s, t, lr=0.01, wd=0.01, skipped=not d),
        "lars paper": lambda w, g, s, t, n, d: reference.mlperf_lars(w, g, s, t, lr=0.01, wd=0.01 * d, skipped=False),
        "larc apex": lambda w, g, s, t, n, d: reference.apex_larc(w, g, s, t, lr=0.01, wd=0.01 * d),
    }[name]
    skips = preset in ("tfa", "mlperf")  # programs that leave the same tensors out of decay and ratio, by name
    return program, {"kind": kind, "preset": preset, "excluded": {"adapt": "never"} if skips else {}}


ALL_PRESETS = [
    *(f"lamb {preset}" for preset in LAMB_PRESETS),
    *(f"lars {preset}" for preset in LARS_PRESETS),
    *(f"larc {preset}" for preset in LARC_PRESETS),
]


@pytest.mark.parametrize("name", ALL_PRESETS)
@pytest.mark.quick(2)
def test_presets_are_the_programs_they_are_named_after(name: str) -> None:
    program, ours = other_program(name)
    params = parameters(torch.float32)
    weights, states = [p.detach().numpy().copy() for p in params], [{} for _ in params]
    groups = in_groups(params, 0.01)
    groups[1] |= ours["excluded"]
    optimizer = KINDS[ours["kind"]](groups, lr=0.01, preset=ours["preset"])
    for step in range(50):
        give_gradients(params, step)
        if name == "larc apex" and step == 4:
            params[3].grad.fill_(0.1)  # apex leaves out the decay, too, where a gradient is zero
        gradients = [p.grad.numpy() for p in params]
        total = float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients)))
        for p, w, g, s in zip(params, weights, gradients, states, strict=True):
            program(w, g, s, step + 1, total, float(p.dim() > 1))
        optimizer.step()
    for p, w in zip(params, weights, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), w, rtol=1e-6, atol=1e-6)


# --- as a torch optimizer --------------------------------------------------------------------------------------------


EACH = pytest.mark.parametrize("kind", KINDS)


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> list[Tensor]:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return [p.detach().clone() for p in params]


@EACH
@pytest.mark.quick(1)
def test_goes_down_a_quadratic(kind: str) -> None:
    w = nn.Parameter(torch.full((30, 30), 2.0))
    optimizer = KINDS[kind]([w], lr=1.0 if kind == "lars" else 0.05, weight_decay=0.0)
    for _ in range(300):
        w.grad = w.detach() * torch.linspace(1, 20, 900).view(30, 30)
        optimizer.step()
    assert float(w.detach().abs().mean()) < 1.0


@EACH
@pytest.mark.quick(1)
def test_trains_a_small_net(kind: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    inputs = torch.randn(256, 4)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    optimizer = KINDS[kind](
        parameter_groups(net, weight_decay=1e-4), lr={"lamb": 0.02, "lars": 10.0, "larc": 0.5}[kind]
    )
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 < losses[0]


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_keeps_types_and_gradients(kind: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = KINDS[kind](in_groups(params, 0.01), lr=0.01, clip_norm=0.1)
    give_gradients(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert {tensor.dtype for tensor in [*params, *states]} == {dtype}
    assert all(torch.equal(p.grad, old) for p, old in zip(params, before, strict=True) if p.grad is not None)
    assert all(p.isfinite().all() for p in params)


@EACH
def test_resumes_to_the_same_bits_even_through_a_file(kind: str, tmp_path: Any) -> None:
    whole, params = parameters(), parameters()
    expected = stepped(KINDS[kind](in_groups(whole, 0.01), lr=0.01), whole, range(6))
    first = KINDS[kind](in_groups(params, 0.01), lr=0.01)
    stepped(first, params, range(3))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = KINDS[kind](in_groups(params, 0.5), lr=7.0)
    second.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert all(map(torch.equal, stepped(second, params, range(3, 6)), expected))
    copied = copy.deepcopy(second)
    assert copied.clip_norm == second.clip_norm


@EACH
def test_zero_weights_move_and_excluded_ones_step_as_if_the_ratio_were_one(kind: str) -> None:
    zeros, excluded = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.full((6,), 3.0))
    optimizer = KINDS[kind]([{"params": [zeros]}, {"params": [excluded], "adapt": "never"}], lr=0.1, weight_decay=0.0)
    zeros.grad, excluded.grad = torch.full((6,), 2.0), torch.full((6,), 2.0)
    optimizer.step()
    moved = 0.1 if kind == "lamb" else 0.2  # Adam's first step is the sign of the gradient
    assert torch.allclose(zeros, torch.full((6,), -moved), atol=1e-5)
    assert torch.allclose(excluded, torch.full((6,), 3.0 - moved), atol=1e-5)


@EACH
def test_closures_added_groups_and_rates_in_tensors(kind: str) -> None:
    a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = KINDS[kind]([a], lr=torch.tensor(0.1))
    optimizer.add_param_group({"params": [b], "lr": 0.1})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (a**2).sum() + (b**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert torch.equal(a, b)
    assert float(a.detach().max()) < 1.0


@EACH
def test_parameters_without_a_gradient_stay_and_count_no_step(kind: str) -> None:
    params, late = parameters(), parameters()
    optimizer, other = KINDS[kind](params, lr=0.01), KINDS[kind](late, lr=0.01)
    give_gradients(params, 0)
    params[2].grad = None
    optimizer.step()
    assert torch.equal(params[2], late[2])
    give_gradients(params, 1)
    optimizer.step()
    give_gradients(late, 1)
    other.step()
    assert torch.equal(params[2], late[2])  # its first step, beside the others' second


@EACH
@pytest.mark.quick(1)
def test_blocks_and_layouts_change_rounding_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(block: int, memory_format: torch.memory_format) -> Tensor:
        patch_blocks(monkeypatch, block)
        start = torch.arange(2 * 40 * 6 * 6, dtype=torch.float64).view(2, 40, 6, 6).sin()
        w = nn.Parameter(start.clone(memory_format=memory_format))
        optimizer = KINDS[kind]([w], lr=0.01)
        for step in range(5):
            gradient = (start * (step + 1)).cos()
            w.grad = gradient.contiguous(memory_format=memory_format) if step % 2 else gradient  # laid out otherwise
            optimizer.step()
        return w.detach().contiguous()

    expected = end(1 << 20, torch.contiguous_format)
    for block in (1000, 640, 2880):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            torch.testing.assert_close(end(block, memory_format), expected, rtol=1e-12, atol=1e-14)


@EACH
def test_complex_parameters_and_a_model_on_the_meta_device(kind: str) -> None:
    real = nn.Parameter(torch.randn(8, 2, dtype=torch.float64))
    both = nn.Parameter(torch.view_as_complex(real.detach().clone()))
    for p in (real, both):
        optimizer = KINDS[kind]([p], lr=0.01)
        for _ in range(3):
            p.grad = p.detach().clone() * 2
            optimizer.step()
    assert torch.allclose(torch.view_as_real(both), real, rtol=1e-12)
    with torch.device("meta"):
        groups = parameter_groups(CNN(in_channels=1, image_size=8, num_classes=10), weight_decay=0.1)
    assert KINDS[kind](groups).param_groups[1]["weight_decay"] == 0.0


@EACH
def test_sparse_gradients_are_refused_before_anything_changes(kind: str) -> None:
    first, w = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 2))
    first.grad, w.grad = torch.ones(3), torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        KINDS[kind]([{"params": [first]}, {"params": [w]}], clip_norm=1.0).step()
    assert torch.equal(first, torch.ones(3))


@EACH
def test_a_rate_of_zero_changes_nothing(kind: str) -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = KINDS[kind]([w], lr=0.0)
    for _ in range(2):
        w.grad = torch.ones(4)
        optimizer.step()
    assert torch.equal(w, torch.ones(4))


@EACH
def test_gaps_between_elements_are_left_out(kind: str) -> None:
    start, gradients = torch.randn(8, 12), torch.randn(5, 8, 12)
    dense, sliced = nn.Parameter(start[:, ::2].clone()), nn.Parameter(start.clone()[:, ::2])
    for w in (dense, sliced):
        optimizer = KINDS[kind]([w], lr=0.1)
        for gradient in gradients:
            w.grad = gradient[:, ::2] if w is sliced else gradient[:, ::2].clone()
            optimizer.step()
    assert sliced.grad is not None and sliced.grad.stride() == sliced.stride() != dense.stride()
    torch.testing.assert_close(sliced, dense)


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("lamb", {"preset": "nvlab"}, "preset='nvlab': LAMB has paper, tfa, nvlamb, apex, timm, mlperf"),
        ("lars", {"preset": "apex"}, "preset='apex': LARS has paper, timm, mlperf"),
        ("larc", {"preset": "paper"}, "preset='paper': LARC has apex, timm"),
        (
            "lamb",
            {"bias_corection": False},
            r"LAMB\(\) has no argument 'bias_corection'. Did you mean 'bias_correction'",
        ),
        ("lamb", {"betas": (0.9, 1.0)}, "betas=1.0: must be a number from 0 up and below 1"),
        ("lars", {"lr": -1.0}, "lr=-1.0: must be a number from 0 up"),
        ("lars", {"nesterov": True, "momentum": 0.0}, "nesterov=True: needs momentum"),
        ("larc", {"adapt": "sometimes"}, "adapt='sometimes': take one of always, with_decay, never"),
        ("lamb", {"clip_norm": 0.0}, "clip_norm=0.0: must be a number above 0, or leave it out"),
        ("lamb", {"weight_decay": "a"}, "weight_decay='a': must be a number"),
        ("lamb", {"betas": 0.9}, "betas=0.9: must be two numbers"),
        ("lars", {"norm_bounds": [1, "a"]}, "norm_bounds='a': must be a number from 0 up"),
        ("lamb", {"norm_bounds": (10, 1)}, r"norm_bounds=\(10, 1\): want two ascending numbers from 0 up"),
        ("larc", {"nesterov": 1}, "nesterov=1: must be True or False"),
        ("larc", {"adapt": 1}, "adapt=1: take one of always, with_decay, never"),
    ],
)
def test_mistakes(kind: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KINDS[kind]([nn.Parameter(torch.ones(2))], **arguments)


def test_groups() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    net[1].bias.requires_grad_(False)
    decaying, excluded = parameter_groups(net, weight_decay=0.1, exclude=["0.*"], adapt="never")
    assert [list(p.shape) for p in decaying["params"]] == [[3, 4]]
    assert [list(p.shape) for p in excluded["params"]] == [[5, 4], [3], [3]]
    assert (decaying["weight_decay"], excluded["weight_decay"], excluded["adapt"]) == (0.1, 0.0, "never")
    with pytest.raises(
        ConfigError, match=r"optim.exclude: no trained parameter is called 'embed\*'; names are like 0.w"
    ):
        parameter_groups(net, weight_decay=0.1, exclude=["embed*"])


@pytest.mark.parametrize(
    ("kind", "rate", "presets"),
    [("lamb", 1e-3, LAMB_PRESETS), ("lars", 1.0, LARS_PRESETS), ("larc", 1.0, LARC_PRESETS)],
)
def test_help_shows_the_defaults_and_every_preset(kind: str, rate: float, presets: dict[str, Any]) -> None:
    shown = inspect.signature(KINDS[kind]).parameters
    assert (shown["lr"].default, shown["preset"].default) == (rate, next(iter(presets)))
    assert all(f'"{preset}"' in (KINDS[kind].__doc__ or "") for preset in presets)
