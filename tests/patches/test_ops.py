"""hfax's lowerings of single operations against torch's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hfax.patches.ops import convolution, embedding_bag, interpolate, linear, masked_scatter
from hfax.tracing import torchax as tracing


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 3), (7,)])
@pytest.mark.parametrize("width", [8, 2048, 4095, 4096, 5000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_agrees_with_float64_as_closely_as_torch(rows: tuple[int, ...], width: int, has_bias: bool) -> None:
    rng = np.random.default_rng(width)
    x = torch.from_numpy(rng.standard_normal((*rows, width))).to(torch.bfloat16)
    weight = torch.from_numpy(rng.standard_normal((24, width))).to(torch.bfloat16)
    bias = torch.from_numpy(rng.standard_normal(24)).to(torch.bfloat16) if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).numpy()
    theirs = torch.nn.functional.linear(x, weight, bias).double().numpy()
    ours = linear(*(None if t is None else jnp.asarray(t.float().numpy(), jnp.bfloat16) for t in (x, weight, bias)))
    assert ours.dtype == jnp.bfloat16
    # A single row is rounded once before its bias is added (see `linear`): one more rounding of bfloat16, at most 2**-8 of it.
    one_rounding = 2.0**-8 * np.abs(exact).max()
    allowed = 1.2 * np.abs(theirs - exact).max() + (one_rounding if has_bias and np.prod(rows) == 1 else 1e-6)
    assert np.abs(np.asarray(ours, np.float64) - exact).max() <= allowed


def test_linear_in_float32_agrees_with_torch() -> None:
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(s, dtype=np.float32) for s in ((3, 33), (5, 33), (5,)))
    expected = torch.nn.functional.linear(*map(torch.from_numpy, (x, weight, bias))).numpy()
    np.testing.assert_allclose(linear(*map(jnp.asarray, (x, weight, bias))), expected, atol=1e-5)


def test_linear_with_a_vector_for_weight() -> None:
    x, weight = np.ones((2, 3), np.float32), np.array([1, 2, 3], np.float32)
    expected = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(weight)).numpy()
    np.testing.assert_allclose(linear(jnp.asarray(x), jnp.asarray(weight)), expected)


_SIZES = [(7,), (5, 3), (11, 14), (4, 4)]


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", _SIZES[1:], ids=str)
def test_interpolate_in_two_dimensions(mode: str, size: tuple[int, int], antialias: bool) -> None:
    if antialias and mode.startswith("nearest"):
        with pytest.raises(ValueError, match="bilinear"):
            torch.nn.functional.interpolate(torch.zeros(1, 1, 2, 2), size=size, mode=mode, antialias=True)
        return
    x = torch.randn((2, 3, 6, 8), generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.interpolate(x, size=size, mode=mode, antialias=antialias)
    out = interpolate(jnp.asarray(x.numpy()), size=size, mode=mode, antialias=antialias)
    np.testing.assert_allclose(out, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize(("mode", "axes"), [("linear", 1), ("bilinear", 2), ("trilinear", 3)])
def test_interpolate_by_factors(mode: str, axes: int, align: bool) -> None:
    x = torch.randn((1, 2, 5, 6, 4)[: axes + 2], generator=torch.Generator().manual_seed(0))
    for factor in (2, 1.7, 0.6):
        options = {"scale_factor": factor, "mode": mode, "align_corners": align}
        expected = torch.nn.functional.interpolate(x, **options)
        np.testing.assert_allclose(interpolate(jnp.asarray(x.numpy()), **options), expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(mode: str) -> None:
    weight = torch.randn((9, 4), generator=torch.Generator().manual_seed(0))
    bags = torch.tensor([[1, 2, 2], [0, 8, 3]])
    expected = torch.nn.functional.embedding_bag(bags, weight, mode=mode).numpy()
    np.testing.assert_allclose(embedding_bag(jnp.asarray(bags), jnp.asarray(weight), mode=mode), expected, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="offsets"):
        embedding_bag(jnp.asarray(bags), jnp.asarray(weight), offsets=[0])


CROSS_ENTROPIES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "ignored": {"ignore_index": 3},
    "weights": {"weight": torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])},
    "smoothed": {"label_smoothing": 0.3},
    "smoothed, weighted, ignored": {
        "label_smoothing": 0.3,
        "weight": torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0]),
        "ignore_index": 1,
    },
}


@pytest.mark.parametrize(("shape", "normalized"), [((3, 4, 8), (8,)), ((5, 2, 6), (2, 6))])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm_and_its_gradients_are_torchs(shape, normalized, eps, has_weight):
    import jax

    from hfax.patches.ops import rms_norm

    torch.manual_seed(0)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(normalized, requires_grad=True)
    given = (x, weight) if has_weight else (x,)
    expected = torch.nn.functional.rms_norm(x, normalized, *given[1:], eps=eps)
    upstream = torch.randn(shape)
    expected.backward(upstream)
    run = lambda x, *weight: rms_norm(x, normalized, *weight, eps=eps)  # noqa: E731
    out, pull = jax.vjp(run, *(t.detach().numpy() for t in given))
    np.testing.assert_allclose(out, expected.detach().numpy(), atol=1e-6)
    for own, tensor in zip(pull(upstream.numpy()), given, strict=True):
        np.testing.assert_allclose(own, tensor.grad.numpy(), atol=2e-5)


@pytest.mark.parametrize(("shifts", "dims"), [(2, None), (3, -1), (-1, 0), ((1, -2), (0, 1))])
def test_roll_and_its_gradient_are_torchs(shifts, dims):
    import jax

    from hfax.patches.ops import roll

    torch.manual_seed(0)
    x, upstream = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    expected = torch.roll(x, shifts, dims)
    expected.backward(upstream)
    out, pull = jax.vjp(lambda x: roll(x, shifts, dims), x.detach().numpy())
    np.testing.assert_array_equal(out, expected.detach().numpy())
    np.testing.assert_array_equal(pull(upstream.numpy())[0], x.grad.numpy())


@pytest.mark.parametrize("shape", [(5,), (7, 5), (3, 5, 4, 2)])
@pytest.mark.parametrize("options", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
@pytest.mark.parametrize("of_probabilities", [False, True])
def test_cross_entropy_and_its_gradient_are_torchs(shape, options, of_probabilities):
    import jax

    from hfax.patches.ops import cross_entropy

    torch.manual_seed(0)
    logits = torch.randn(shape, requires_grad=True)
    classes = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.softmax(torch.randn(shape), dim=1 if len(shape) > 1 else 0) if of_probabilities else None
    target = torch.randint(0, 5, classes) if target is None else target
    if of_probabilities and "ignore_index" in options:
        return  # torch refuses it
    expected = torch.nn.functional.cross_entropy(logits, target, **options)
    expected.sum().backward()
    given = {n: v.numpy() if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    run = lambda x: cross_entropy(x, target.numpy(), **given)  # noqa: E731
    np.testing.assert_allclose(run(logits.detach().numpy()), expected.detach().numpy(), atol=1e-6)
    gradient = jax.grad(lambda x: run(x).sum())(logits.detach().numpy())
    np.testing.assert_allclose(gradient, logits.grad.numpy(), atol=1e-6)


_SCATTERS = {  # shapes of the numbers, of the mask and of the source
    "numbers": ((2, 3, 4), (2, 3, 4), (30,)),
    "rows": ((2, 5, 4), (2, 5, 1), (11, 4)),
    "rows of rows": ((3, 2, 4), (3, 1, 1), (3, 8)),
    "of all rows": ((2, 5, 4), (5, 1), (40,)),
    "a source in parts of rows": ((2, 5, 4), (2, 5, 1), (43,)),
    "all or nothing": ((2, 3), (1, 1), (6,)),
    "a larger mask": ((4,), (5, 4), (20,)),
}


@pytest.mark.parametrize("shapes", _SCATTERS.values(), ids=_SCATTERS)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_masked_scatter_and_its_gradients_are_torchs(shapes: tuple[tuple[int, ...], ...], share: float) -> None:
    rng = np.random.default_rng(1)
    x, source = (rng.standard_normal(shape, dtype=np.float32) for shape in (shapes[0], shapes[2]))
    mask = rng.random(shapes[1]) < share
    theirs = [torch.from_numpy(a).requires_grad_() for a in (x, source)]
    expected = theirs[0].expand(np.broadcast_shapes(*shapes[:2])).masked_scatter(torch.from_numpy(mask), theirs[1])
    weights = rng.standard_normal(tuple(expected.shape), dtype=np.float32)
    (expected * torch.from_numpy(weights)).sum().backward()

    def total(x: jax.Array, source: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = masked_scatter(x, jnp.asarray(mask), source)
        return (out * weights).sum(), out

    gradients, out = jax.grad(total, argnums=(0, 1), has_aux=True)(jnp.asarray(x), jnp.asarray(source))
    np.testing.assert_array_equal(out, expected.detach().numpy())
    for ours, tensor in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(ours, tensor.grad.numpy(), atol=1e-6)


def test_features_among_embeddings_are_placed_by_rows() -> None:
    """A mask that modelling code has expanded over the width of embeddings counts tokens, not numbers."""

    def place(embeddings: Any, mask: Any, features: Any) -> Any:
        return embeddings.masked_scatter(mask.unsqueeze(-1).expand_as(embeddings).to(embeddings.device), features)

    rng = np.random.default_rng(2)
    given = rng.standard_normal((2, 7, 6)), rng.random((2, 7)) < 0.4, rng.standard_normal((14, 6))

    def call(*arrays: jax.Array) -> Any:
        wrapped = [tracing.wrap(a) for a in arrays]
        return tracing.call_module(torch.nn.Identity(), {}, lambda _: tracing.unwrap(place(*wrapped)))

    arrays = [jnp.asarray(a.astype(np.float32) if a.dtype == np.float64 else a) for a in given]
    expected = place(*(torch.from_numpy(np.array(a)) for a in arrays)).numpy()
    np.testing.assert_array_equal(jax.jit(call)(*arrays), expected)
    sums = [e for e in jax.make_jaxpr(call)(*arrays).jaxpr.eqns if e.primitive.name in ("cumsum", "pjit", "jit")]
    assert "i32[2,7] = cumsum" in str(sums)
    assert "i32[2,7,6] = cumsum" not in str(sums)


@pytest.mark.parametrize("kernel", [(5,), (3, 4), (2, 3, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_convolution_with_a_single_place_is_a_product(kernel: tuple[int, ...], has_bias: bool) -> None:
    rng = np.random.default_rng(3)
    x, weight = (rng.standard_normal((n, 3, *kernel), dtype=np.float32) for n in (4, 6))
    bias = rng.standard_normal(6, dtype=np.float32) if has_bias else None
    axes = len(kernel)
    function = getattr(torch.nn.functional, f"conv{axes}d")
    tensors = [None if a is None else torch.from_numpy(a) for a in (x, weight, bias)]
    arrays = [None if a is None else jnp.asarray(a) for a in (x, weight, bias)]
    options = ([1] * axes, [0] * axes, [1] * axes, False, [0] * axes, 1)
    np.testing.assert_allclose(convolution(*arrays, *options), function(*tensors, stride=kernel), atol=1e-5)
    assert "conv" not in str(jax.make_jaxpr(lambda *a: convolution(*a, None, *options))(*arrays[:2]))
