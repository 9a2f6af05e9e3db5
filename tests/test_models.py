"""Every model: shapes, determinism, and a gradient for each parameter; then what is particular to one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp.data.sets.image_sets import load_digits
from ddp.errors import ConfigError
from ddp.models import CNN, GPT, MLP, generate, resnet, rotary_angles, rotate
from ddp.train.steps.task import Classification

Build = Callable[[], nn.Module]


def images(channels: int, size: int) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


TOKENS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))

MEMBERS: dict[str, tuple[Build, Tensor, tuple[int, ...]]] = {
    "mlp": (lambda: MLP(in_features=64, num_classes=10), images(1, 8), (2, 10)),
    "linear": (lambda: MLP(in_features=64, hidden=(), num_classes=10), images(1, 8), (2, 10)),
    "cnn 8": (lambda: CNN(in_channels=1, image_size=8, num_classes=10), images(1, 8), (2, 10)),
    "cnn 28": (lambda: CNN(in_channels=1, image_size=28, num_classes=10), images(1, 28), (2, 10)),
    "cnn 32": (lambda: CNN(in_channels=3, image_size=32, num_classes=7, width=8), images(3, 32), (2, 7)),
    "cnn 5": (lambda: CNN(in_channels=3, image_size=5, num_classes=7), images(3, 5), (2, 7)),
    "resnet18": (lambda: resnet("resnet18", num_classes=5, small_images=True), images(3, 32), (2, 5)),
    "resnet50": (lambda: resnet("resnet50", num_classes=5, small_images=False), images(3, 64), (2, 5)),
    "grey resnet": (lambda: resnet(num_classes=5, small_images=True, in_channels=1), images(1, 28), (2, 5)),
    "gpt": (lambda: GPT(context=16, width=16, depth=2, heads=4), TOKENS, (2, 12, 256)),
    "gpt dropout": (lambda: GPT(context=12, width=16, depth=1, heads=2, dropout=0.2), TOKENS, (2, 12, 256)),
}


@pytest.fixture(params=MEMBERS, ids=str)
def member(request: pytest.FixtureRequest) -> tuple[Build, Tensor, tuple[int, ...]]:
    return MEMBERS[request.param]


@pytest.mark.quick(1)
def test_shape_and_gradients(member: tuple[Build, Tensor, tuple[int, ...]]) -> None:
    build, inputs, shape = member
    torch.manual_seed(0)
    model = build()
    out = model(inputs)
    assert out.shape == shape
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.quick(1)
def test_the_seed_decides_the_weights(member: tuple[Build, Tensor, tuple[int, ...]]) -> None:
    build, _, _ = member
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in build().parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.quick(1)
def test_an_output_depends_on_its_own_sample_only(member: tuple[Build, Tensor, tuple[int, ...]]) -> None:
    """In evaluation, so also for BatchNorm; without it a batch could not be split among workers."""
    build, inputs, _ = member
    torch.manual_seed(0)
    model = build().double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    with torch.no_grad():
        one_by_one = torch.cat([model(sample[None]) for sample in inputs])
        torch.testing.assert_close(model(inputs), one_by_one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [8, 28, 32])
def test_cnn_has_no_state_but_parameters(size: int) -> None:
    assert not list(CNN(in_channels=1, image_size=size, num_classes=10).buffers())


def test_cnn_parameter_count_is_as_documented() -> None:
    assert sum(p.numel() for p in CNN(in_channels=1, image_size=8, num_classes=10).parameters()) == 151_306


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet18", 11.2), ("resnet34", 21.3), ("resnet50", 23.5)],
)
def test_resnet_sizes_are_those_of_the_paper(name: str, millions: float) -> None:
    model = resnet(name, num_classes=10, small_images=True)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


def test_resnet_stem_keeps_small_images_large() -> None:
    small, large = (resnet(num_classes=2, small_images=is_small) for is_small in (True, False))
    for model, expected in ((small, 32), (large, 8)):
        x = model.maxpool(model.conv1(images(3, 32)))  # type: ignore[operator]
        assert x.shape[-1] == expected


def tiny_gpt(**changes: int) -> GPT:
    torch.manual_seed(0)
    settings = {"context": 16, "width": 32, "depth": 2, "heads": 4}
    return GPT(**(settings | changes)).double().eval()  # type: ignore[arg-type]


def test_gpt_does_not_see_the_future() -> None:
    model, tokens = tiny_gpt(), TOKENS.clone()
    before = model(tokens)
    tokens[:, 7] = (tokens[:, 7] + 1) % 256
    after = model(tokens)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-13)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-9  # and everything later has seen it


def test_gpt_knows_the_order_of_what_it_has_read() -> None:
    model, tokens = tiny_gpt(), TOKENS[:1].clone()
    swapped = tokens[:, [1, 0, *range(2, tokens.shape[1])]]
    assert tokens[0, 0] != tokens[0, 1]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-9


def test_gpt_parameter_count_and_initial_loss() -> None:
    model = GPT(context=64, width=64, depth=3, heads=4)
    gains = 64 * (2 * 3 + 1)
    assert sum(p.numel() for p in model.parameters()) == 12 * 3 * 64**2 + 256 * 64 + gains
    tokens = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(1))
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.03)  # it knows nothing yet


def test_gpt_initialisation_is_as_documented() -> None:
    torch.manual_seed(0)
    model = GPT(context=16, width=128, depth=8, heads=4)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif name == "embedding.weight":
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05)
        else:
            shrink = 4 if name.endswith("project.weight") else 1  # √(2 · 8)
            assert parameter.std().item() == pytest.approx(parameter.shape[1] ** -0.5 / shrink, rel=0.05)


def test_gpt_attention_equals_the_written_out_formula() -> None:
    attention = tiny_gpt().blocks[0].attention
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    angles = rotary_angles(6, 8)
    query, key, value = attention.query_key_value(x).chunk(3, dim=-1)  # type: ignore[operator, union-attr]
    heads = []
    for h in range(4):
        columns = slice(8 * h, 8 * h + 8)
        q, k = rotate(query[None, ..., columns], angles)[0], rotate(key[None, ..., columns], angles)[0]
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ value[..., columns])
    expected = torch.cat(heads, dim=-1) @ attention.project.weight.T  # type: ignore[union-attr]
    torch.testing.assert_close(attention(x, angles), expected, rtol=1e-10, atol=1e-12)  # type: ignore[operator]


def test_rotation_is_a_complex_product_and_relative() -> None:
    """Oracle: complex numbers. And the product of query and key depends on the distance alone."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 10, 8, dtype=torch.float64, generator=random)
    angles = rotary_angles(10, 8)
    torch.testing.assert_close(angles[3], 3 * torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64))
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angles)
    torch.testing.assert_close(rotate(x, angles), torch.cat((turned.real, turned.imag), dim=-1))

    query, key = x[:, :, :1].expand_as(x), x[:, :, 1:2].expand_as(x)  # the same vectors at every position
    products = rotate(query, angles) @ rotate(key, angles).transpose(-1, -2)
    for distance in range(-9, 10):
        diagonal = products[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_gpt_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"width=30 .*heads=4.*multiple of 8"):
        GPT(context=8, width=30, depth=1, heads=4)
    with pytest.raises(ValueError, match=r"17 tokens.*context=16"):
        tiny_gpt()(torch.zeros(1, 17, dtype=torch.int64))


def test_cnn_learns_digits_in_seconds() -> None:
    torch.manual_seed(0)
    splits, task = load_digits(), Classification()
    model = CNN(in_channels=1, image_size=8, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for start in range(0, 4 * len(splits.train), 64):
        indices = [i % len(splits.train) for i in range(start, start + 64)]
        loss_sum, count = task.loss(model, splits.train.batch(indices))  # type: ignore[attr-defined]
        optimizer.zero_grad()
        (loss_sum / count).backward()
        optimizer.step()
    model.eval()
    right, count = task.metrics(model, splits.test.batch(range(len(splits.test))))["accuracy"]  # type: ignore[attr-defined]
    assert right / count > 0.95


def test_gpt_generates_what_it_predicts() -> None:
    """Nearly without chance, every token is the likeliest one after those that the context still holds."""
    model, tokens = tiny_gpt(), TOKENS[0, :5]
    drawn = generate(model, tokens, num_tokens=20, temperature=1e-4)
    for token in drawn:
        assert token == model(tokens[None, -model.context :])[0, -1].argmax()
        tokens = torch.cat([tokens, token[None]])
    warm = [generate(model, tokens, num_tokens=30, seed=seed).tolist() for seed in (0, 0, 1)]
    assert warm[0] == warm[1] != warm[2]
