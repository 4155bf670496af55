"""Programs at another precision, run by PyTorch without compiling."""

import pytest

from enginegate.engines.torch_inductor.typed_program import (
    AxisSizes,
    torch_type,
    traced_again,
    typed_module,
)
from enginegate.errors import BuildError

torch = pytest.importorskip("torch")
BATCH = torch.export.Dim("batch")


class Positions(torch.nn.Module):
    """One weight, and positions, which float16 counts up to 2,048 only."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, count):
        positions = torch.arange(4, device=x.device) + count[:, :1]
        angles = positions.to(torch.float32) * 3.0
        return {"y": self.linear(x) * torch.cos(angles), "angles": angles}


class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


@pytest.fixture
def given():
    torch.manual_seed(0)
    return torch.randn(3, 4), torch.tensor([[1], [3001], [5003]])


def program(module, given):
    return torch.export.export(
        module, given, dynamic_shapes=tuple({0: BATCH} for _ in given), strict=False
    )


@pytest.mark.parametrize(("precision", "limit"), [("fp16", 1e-2), ("bf16", 5e-2)])
def test_weights_are_cast_and_the_door_keeps_its_types(given, precision, limit):
    """Float32 in and out; between them another type, by a little."""
    module = Positions().eval()
    expected = module(*given)["y"].detach()

    typed = typed_module(program(module, given), dtype=torch_type(precision), device="cpu")
    answer = typed(*given)["y"]

    assert {parameter.dtype for parameter in typed.parameters()} == {torch_type(precision)}
    assert answer.dtype is torch.float32
    assert 0.0 < (answer - expected).abs().max() < limit


def test_arithmetic_on_positions_stays_exact(given):
    """An angle of position 5,003 in float16 would be that of another position."""
    module = Positions().eval()
    expected = module(*given)["angles"]

    typed = typed_module(program(module, given), dtype=torch.float16, device="cpu")

    torch.testing.assert_close(typed(*given)["angles"], expected)


def test_program_is_traced_again_for_the_sizes_that_are_served(given):
    """Its batch is the one that was asked for, and its outputs are a flat tuple."""
    typed = typed_module(program(Positions().eval(), given), dtype=torch.float32, device="cpu")

    again = traced_again(typed, given, [{0: AxisSizes("s0", 1, 6)}] * 2)

    (span,) = again.range_constraints.values()
    assert (int(span.lower), int(span.upper)) == (1, 6)
    assert [tuple(each.shape) for each in again.module()(*given)] == [(3, 4), (3, 4)]


def test_control_flow_is_refused():
    """Its branches are programs of their own, whose types nothing would change."""
    branching = torch.export.export(Branches(), (torch.ones(3, 4),), strict=False)

    with pytest.raises(BuildError, match="control flow"):
        typed_module(branching, dtype=torch.float16, device="cpu")
