"""Chunked cross-entropy is plain cross-entropy, in value and gradient, without ever holding all logits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_ring.model.loss import IGNORE, chunked_cross_entropy


def problem(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 12, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 12, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, 37, (num_tokens,), generator=generator)
    targets[::4] = IGNORE
    return hidden, weight, targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 8, 1000])
def test_value_and_gradients_are_those_of_plain_cross_entropy(num_tokens: int, chunk_tokens: int) -> None:
    hidden, weight, targets = problem(num_tokens)
    expected = torch.autograd.grad(3.0 * plain(hidden, weight, targets), (hidden, weight))
    loss_sum, count = chunked_cross_entropy(hidden, weight, targets, chunk_tokens)
    assert count == (targets != IGNORE).sum()
    torch.testing.assert_close(loss_sum, plain(hidden, weight, targets), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(3.0 * loss_sum, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, targets = problem(6)
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets, 4)[0], (hidden, weight))
    bias = torch.linspace(-1, 1, 37, dtype=torch.float64, requires_grad=True)
    biased = partial(chunked_cross_entropy, targets=targets, chunk_tokens=4, softcap=2.0)
    assert torch.autograd.gradcheck(lambda h, w, b: biased(h, w, bias=b)[0], (hidden, weight, bias))


def test_bfloat16_is_summed_in_fp32() -> None:
    hidden, weight, targets = problem(200, torch.bfloat16)
    loss_sum, _ = chunked_cross_entropy(hidden, weight, targets, 16)
    assert loss_sum.dtype == torch.float32
    loss_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    exact = plain(hidden.detach().double(), weight.detach().double(), targets)
    torch.testing.assert_close(loss_sum.double(), exact, rtol=2e-3, atol=0)


def test_large_logits_stay_finite() -> None:
    hidden, weight, targets = problem(9, torch.float32)
    loss_sum, _ = chunked_cross_entropy(hidden * 1e4, weight, targets, 4)
    loss_sum.backward()
    assert torch.isfinite(loss_sum)
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_frozen_weights_or_inputs_are_allowed() -> None:
    hidden, weight, targets = problem(9)
    expected = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    for index, (frozen_hidden, frozen_weight) in enumerate(((False, True), (True, False))):
        pair = (hidden.detach() if frozen_hidden else hidden, weight.detach() if frozen_weight else weight)
        (grad,) = torch.autograd.grad(chunked_cross_entropy(*pair, targets, 4)[0], (pair[index],))
        torch.testing.assert_close(grad, expected[index])


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation gave, forward or backward."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


def test_no_tensor_is_larger_than_one_chunk_of_logits() -> None:
    hidden, weight, targets = problem(400)
    with LargestTensor() as largest:
        chunked_cross_entropy(hidden, weight, targets, 150)[0].backward()
    assert largest.num_elements == 150 * 37
    with LargestTensor() as largest:
        plain(hidden, weight, targets).backward()
    assert largest.num_elements == 400 * 37


def test_a_chunk_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        chunked_cross_entropy(*problem(3), 0)
