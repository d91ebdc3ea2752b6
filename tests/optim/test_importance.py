"""The Hessian's diagonal, by Hutchinson's probes and from Adam's second moment."""

import pytest
import torch
from torch import nn

from megatron_adacc.errors import UserError
from megatron_adacc.optim import BlockAdamW
from megatron_adacc.optim.importance import block_sums, hutchinson_diagonal, second_moment_diagonal


def test_one_probe_is_exact_for_a_diagonal_hessian():
    curvature = torch.tensor([[3.0, -1.0], [0.5, 0.0]])
    weight, other = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(3))
    (diagonal, none) = hutchinson_diagonal(lambda: (0.5 * curvature * weight**2).sum(), [weight, other], 1)
    assert torch.equal(diagonal, curvature)
    assert torch.equal(none, torch.zeros(3))


def test_probes_average_out_what_is_off_the_diagonal():
    root = torch.randn(12, 12)
    hessian = root @ root.t()
    weight = nn.Parameter(torch.randn(12))
    (diagonal,) = hutchinson_diagonal(lambda: 0.5 * weight @ hessian @ weight, [weight], 1000)
    # Variance of a probe's row: the sum of squares beside the diagonal.
    deviation = ((hessian.square().sum(1) - hessian.diag().square()) / 1000).sqrt()
    assert bool(((diagonal - hessian.diag()).abs() < 4.5 * deviation).all())
    assert float((diagonal - hessian.diag()).abs().max()) > 0


def test_probes_depend_on_the_seed_alone():
    weight = nn.Parameter(torch.randn(6))
    results = [hutchinson_diagonal(lambda: weight.sum() ** 3, [weight], 2, seed=seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    with pytest.raises(UserError, match="at least one probe"):
        hutchinson_diagonal(lambda: weight.sum(), [weight], 0)


def test_the_second_moment_is_the_mean_of_squared_gradients():
    parameter = nn.Parameter(torch.zeros(10, 60))
    optimizer = BlockAdamW([parameter], bits=32, betas=(0.9, 0.5))
    assert not second_moment_diagonal(optimizer, parameter).any()
    for scale in (1.0, 2.0):
        parameter.grad = torch.full((10, 60), scale)
        optimizer.step()
    # (1/4 of 1 + 1/2 of 4) / (1 - 1/4)
    assert torch.allclose(second_moment_diagonal(optimizer, parameter), torch.tensor(3.0))
    assert block_sums(torch.ones(10, 60), parameter).tolist() == [256.0, 256.0, 88.0]
