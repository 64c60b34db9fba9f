"""The table of rules, by the type of an operation."""

from collections.abc import Mapping

from hvdtrain.partition import reshaping, rules, slicing
from hvdtrain.partition.draws import draw
from hvdtrain.partition.kinds import Part
from hvdtrain.partition.rules import Rule


def _rows(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: Mapping[str, Rule] = {
    # Elementwise
    **_rows(
        """
        Abs Acos Acosh Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1
        BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Ceil CheckNumerics ClipByValue Complex ComplexAbs
        Cos Cosh Digamma Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater
        GreaterEqual Igamma Igammac Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less
        LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum MulNoNan Ndtri NextAfter
        NotEqual Polygamma PopulationCount Pow Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad
        RightShift Rint Round Rsqrt RsqrtGrad Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus
        SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference Tan Tanh TanhGrad
        TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
        Bitcast Bucketize
        """,
        rules.elementwise,
    ),
    **_rows("AddV2 Sub AddN", rules.additive),
    "Mul": rules.multiplicative,
    **_rows("RealDiv DivNoNan", rules.quotient),
    **_rows("Select SelectV2", rules.selection),
    **_rows("Neg Real Imag Conj", rules.linear),
    "Cast": rules.cast,
    **_rows("Identity IdentityN StopGradient PreventGradient Snapshot", rules.unchanged),
    "EnsureShape": rules.ensure_shape,
    **_rows("ZerosLike OnesLike", rules.ones),
    "BiasAdd": rules.elementwise,
    # By sample
    **_rows("Softmax LogSoftmax NthElement FFT IFFT RFFT IRFFT RGBToHSV HSVToRGB MatrixDiagV3", rules.stacked(1)),
    "TopKV2": rules.unit(rules.stacked(1)),
    "Cross": rules.stacked(1, 1),
    **_rows(
        "Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant Qr Svd SelfAdjointEigV2 Eig MatrixBandPart "
        "MatrixDiagPartV3 FFT2D IFFT2D RFFT2D IRFFT2D",
        rules.stacked(2),
    ),
    **_rows("MatrixSolve MatrixTriangularSolve", rules.stacked(2, 2)),
    "MatrixSetDiagV3": rules.stacked(2, 1),
    "AdjustContrastv2": rules.stacked(3),
    # Reductions and products
    "Sum": rules.reduction("sum"),
    "Mean": rules.reduction("mean"),
    "Max": rules.reduction("max"),
    "Min": rules.reduction("min"),
    "Prod": rules.unit(rules.reduction("product")),
    "Any": rules.reduction("max"),
    "All": rules.reduction("min"),
    "EuclideanNorm": slicing.along(1, drops=True),
    "MatMul": rules.matmul,
    **_rows("BatchMatMul BatchMatMulV2", rules.batch_matmul),
    "Einsum": rules.einsum,
    "L2Loss": rules.squared_norm,
    "BiasAddGrad": rules.bias_gradient,
    "UnsortedSegmentSum": rules.segments("sum"),
    "UnsortedSegmentMax": rules.segments("max"),
    "UnsortedSegmentMin": rules.segments("min"),
    "UnsortedSegmentProd": rules.segments("product"),
    "ScatterNd": rules.scatter,
    # Samples along dim 0
    **_rows("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits", rules.samples([0, 1])),
    "InTopKV2": rules.samples([0, 1]),
    **_rows("Conv2D Conv3D DepthwiseConv2dNative Dilation2D", rules.samples([0])),
    **_rows(
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput", rules.samples([2], sizes=0)
    ),
    **_rows("Conv2DBackpropFilter Conv3DBackpropFilterV2", rules.samples([0, 2], makes=[Part()])),
    "DepthwiseConv2dNativeBackpropFilter": rules.zero_of_none(rules.samples([0, 2], makes=[Part()])),
    "Dilation2DBackpropInput": rules.samples([0, 2]),
    "Dilation2DBackpropFilter": rules.samples([0, 2], makes=[Part()]),
    **_rows("MaxPool AvgPool AvgPool3D LRN", rules.samples([0])),
    "MaxPool3D": rules.unit(rules.samples([0]), never_empty=True),
    **_rows("MaxPoolGrad MaxPoolGradGrad LRNGrad", rules.samples([0, 1, 2])),
    **_rows("AvgPoolGrad AvgPool3DGrad", rules.samples([1], sizes=0)),
    **_rows("ResizeBilinear ResizeBicubic ResizeNearestNeighbor ResizeArea", rules.samples([0])),
    **_rows("ResizeBilinearGrad ResizeBicubicGrad", rules.samples([0, 1])),
    "ResizeNearestNeighborGrad": rules.samples([0]),
    **_rows("ScaleAndTranslate ExtractImagePatches DepthToSpace SpaceToDepth", rules.samples([0])),
    "ImageProjectiveTransformV3": rules.samples([0, 1]),
    # Shapes, and moving dims
    **_rows("Shape ShapeN", reshaping.shape),
    "Size": reshaping.size,
    "Reshape": rules.moving(reshaping.reshape),
    "Transpose": rules.moving(reshaping.transpose),
    "ExpandDims": rules.moving(reshaping.expand_dims),
    "Squeeze": rules.moving(reshaping.squeeze),
    "Pack": reshaping.pack,
    "Unpack": reshaping.unpack,
    "ConcatV2": reshaping.concat,
    "Split": reshaping.split,
    "SplitV": reshaping.split_by_sizes,
    "Tile": rules.moving(reshaping.tile),
    **_rows("Pad PadV2", reshaping.pad),
    "MirrorPad": rules.unit(reshaping.pad, never_empty=True),
    "BroadcastTo": reshaping.broadcast_to,
    "Fill": reshaping.fill,
    "StridedSlice": rules.moving(slicing.strided_slice),
    "StridedSliceGrad": slicing.strided_slice_gradient,
    "Slice": rules.moving(slicing.slice_of),
    "ConcatOffset": slicing.offsets,
    # Gathering and others
    "GatherV2": rules.unit(slicing.gather),
    "ResourceGather": slicing.resource_gather,
    "GatherNd": slicing.gather_nd,
    "OneHot": slicing.one_hot,
    **_rows("ArgMax ArgMin", slicing.along(1, drops=True)),
    **_rows("Cumsum Cumprod CumulativeLogsumexp ReverseV2", slicing.along(1)),
    "Roll": slicing.along(2),
    "BroadcastGradientArgs": slicing.gradient_axes,
    **_rows(
        "StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessRandomUniformIntV2 StatelessRandomUniformFullIntV2 "
        "StatelessTruncatedNormalV2 StatelessRandomGammaV3 StatelessRandomBinomial",
        draw,
    ),
    "Assert": rules.assertion,
    **_rows("NoOp Rank", rules.local),
}
