"""Attention in exported graphs; run by PyTorch without compiling."""

import pytest

from enginegate.engines.torch_inductor.attention import fuse_attention

torch = pytest.importorskip("torch")
ROWS, HEADS, TOKENS, WIDTH = 3, 2, 5, 4


class Attention(torch.nn.Module):
    """Written out as models do; what differs between them is an argument."""

    def __init__(self, *, scale="mul", mask="added", axis=-1, weights_too=False):
        super().__init__()
        self.scale, self.mask, self.axis, self.weights_too = scale, mask, axis, weights_too

    def forward(self, query, key, value, visible):
        scores = query @ key.transpose(-2, -1)
        scores = scores * 0.5 if self.scale == "mul" else scores / 2.0
        hidden = (1.0 - visible[:, None, None, :]) * -1e4
        if self.mask == "added":
            scores = scores + hidden
        elif self.mask == "added to":
            scores = hidden + scores
        weights = torch.dropout(torch.softmax(scores, dim=self.axis), 0.1, train=False)
        return (weights @ value, weights) if self.weights_too else (weights @ value,)


def exported(module, given):
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in given)
    return torch.export.export(module.eval(), given, dynamic_shapes=shapes, strict=False).module(
        check_guards=False
    )


@pytest.fixture
def given():
    torch.manual_seed(0)
    tensors = [torch.randn(ROWS, HEADS, TOKENS, WIDTH) for _ in range(3)]
    visible = torch.ones(ROWS, TOKENS)
    visible[1, 2:] = 0.0
    return (*tensors, visible)


@pytest.mark.parametrize("scale", ["mul", "div"])
@pytest.mark.parametrize("mask", ["added", "added to", "none"])
def test_attention_written_out_becomes_one_operation_with_the_same_answer(given, scale, mask):
    module = Attention(scale=scale, mask=mask)
    expected = module(*given)[0]
    graph_module = exported(module, given)

    assert fuse_attention(graph_module.graph) == 1

    graph_module.recompile()
    targets = [str(node.target) for node in graph_module.graph.nodes]
    assert "aten.scaled_dot_product_attention.default" in targets
    assert "aten.softmax.int" not in targets
    torch.testing.assert_close(graph_module(*given)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unlike", [{"axis": 1}, {"axis": 2}, {"weights_too": True}])
def test_another_softmax_or_weights_that_are_read_stay_as_they_are(given, unlike):
    module = exported(Attention(**unlike), given)

    assert fuse_attention(module.graph) == 0


def test_a_mask_that_widens_the_scores_stays_as_it_is(given):
    """Scores of one row, and a mask of three: the product has three rows, the query one."""

    class Widened(torch.nn.Module):
        def forward(self, query, key, value, mask):
            return torch.softmax(query @ key.transpose(-2, -1) + mask, dim=-1) @ value

    query, key, value, _ = given
    mask = torch.randn(ROWS, HEADS, TOKENS, TOKENS)
    one = (query[:1], key[:1], value[:1], mask)
    module = torch.export.export(Widened(), one, strict=False).module(check_guards=False)

    assert fuse_attention(module.graph) == 0
