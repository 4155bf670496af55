"""Nodes have names of their own, and layers come with what follows them."""

from onnx import TensorProto, helper

from enginegate.precision.onnx_checks import behind_no_layer, name_nodes, regions


def chain(*kinds, names=True):
    """Nodes one after the other."""
    nodes = [
        helper.make_node(kind, [f"t{i}", "other"] if kind == "Add" else [f"t{i}"], [f"t{i + 1}"])
        for i, kind in enumerate(kinds)
    ]
    for index, node in enumerate(nodes):
        node.name = f"n{index}" if names else "same"
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("t0", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info(f"t{len(kinds)}", TensorProto.FLOAT, ["n"])],
    )
    return helper.make_model(graph)


def test_names_are_made_unique():
    """Nodes that share a name, or have none, get one from their type and place."""
    found = name_nodes(chain("Conv", "Relu", "Conv", names=False))

    assert [node.name for node in found.graph.node] == ["Conv_0", "Relu_1", "Conv_2"]
    assert name_nodes(found) == found


def test_region_ends_at_the_next_layer():
    """What lies between two layers belongs to the first."""
    model = chain("Conv", "Relu", "MaxPool", "Conv", "Relu")

    assert regions(model, ["n0"], ["Relu", "MaxPool"]) == {"n0", "n1", "n2"}
    assert regions(model, ["n3"], ["Relu", "MaxPool"]) == {"n3", "n4"}
    assert regions(model, ["n3"], []) == {"n3"}


def test_region_ends_where_branches_meet():
    """Beyond an Add other branches begin, so the walk ends there."""
    model = chain("Conv", "Relu", "Add", "Relu", "Conv")

    assert regions(model, ["n0"], ["Relu", "Add"]) == {"n0", "n1", "n2"}


def test_only_what_follows_a_layer_is_behind_one():
    """Also through one another; not past what is none of them, nor behind a layer that is kept."""
    model = chain("Clip", "Add", "Conv", "Relu", "Add", "Softmax", "Add", "Gemm", "Clip")

    assert behind_no_layer(model, ["Clip", "Add", "Relu"]) == {"n0", "n1", "n6"}
    assert behind_no_layer(model, ["Clip", "Add", "Relu"], ["n2"]) == {
        *("n0", "n1", "n3", "n4", "n6"),
    }
    assert behind_no_layer(model, []) == frozenset()
