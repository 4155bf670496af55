"""ONNX operators by what they cost, with those that runtimes here fuse graphs into."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Nothing: names for the same bytes, done together with a neighbour, or all in the bodies they hold.
FREE = _names(
    "Constant ConstantOfShape Shape Size Reshape Flatten Squeeze Unsqueeze Identity Dropout Cast "
    "Range DequantizeLinear QuantizeLinear DynamicQuantizeLinear If Loop Scan"
)
# Bytes only.
MOVING = _names(
    "Transpose Concat Split Slice Gather GatherND GatherElements ScatterND ScatterElements Pad "
    "Expand Tile Resize Upsample DepthToSpace SpaceToDepth TopK NonZero OneHot EyeLike Trilu "
    "ReverseSequence Compress"
)
# One operation a number that is made.
ELEMENTWISE = _names(
    "Add Sub Mul Div Pow Sqrt Exp Log Erf Tanh Sigmoid HardSigmoid HardSwish Swish Relu LeakyRelu "
    "PRelu Elu Selu Celu Gelu FastGelu QuickGelu BiasGelu Mish Softplus Softsign ThresholdedRelu "
    "Clip Abs Neg Reciprocal Floor Ceil Round Sign Sin Cos Tan Mod Min Max Mean Sum Where Equal "
    "Greater GreaterOrEqual Less LessOrEqual And Or Not Xor IsNaN IsInf BitShift "
    "QLinearAdd QLinearMul"
)
# So many operations a number that is made.
NORMALISING = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "QLinearSoftmax"), 5),
    **dict.fromkeys(("LayerNormalization", "SkipLayerNormalization", "GroupNormalization"), 8),
    **dict.fromkeys(("InstanceNormalization", "MeanVarianceNormalization", "LRN"), 8),
    **dict.fromkeys(("SimplifiedLayerNormalization", "RMSNormalization", "LpNormalization"), 6),
    **dict.fromkeys(("SkipSimplifiedLayerNormalization", "BatchNormalization"), 6),
}
# One operation a number that is read; how their names begin.
FOLDING = ("Reduce", "Global", "ArgMax", "ArgMin", "CumSum")
