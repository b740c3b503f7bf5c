"""The columns of mindstudio-probe's accuracy check: their headers, and which metric each one holds."""

from __future__ import annotations

from trainprobe.op_check.standards.metrics import Metrics

BLANK = " "
RESULT_COLUMNS = ("API name", "Forward Test Success", "Backward Test Success", "Message")
COMPARED_COLUMNS = ("API Name", "Forward Test Success", "Backward Test Success", "Message")
NAME, BENCH, DEVICE, SHAPE, STATUS, MESSAGE = "API Name", "Bench Dtype", "DEVICE Dtype", "Shape", "Status", "Message"
NOT_FINITE, RELATIVE, ABSOLUTE = "inf/nan错误率", "相对误差错误率", "绝对误差错误率"
# header → the field of Metrics
METRICS = {
    "余弦相似度": "cosine",
    "最大绝对误差": "largest",
    "双百指标": "hundredth",
    "双千指标": "thousandth",
    "双万指标": "ten_thousandth",
    "二进制一致错误率": "unequal",
    "误差均衡性": "balance",
    "均方根误差": "rmse",
    "小值域错误占比": "small_wrong",
    "相对误差最大值": "largest_relative",
    "相对误差平均值": "mean_relative",
    NOT_FINITE: "not_finite",
    RELATIVE: "relative_wrong",
    ABSOLUTE: "small_wrong",
    "ULP误差最大值": "ulp_largest",
    "ULP误差平均值": "ulp_mean",
    "ULP误差大于阈值占比": "ulp_share",
}
DETAILS_COLUMNS = (NAME, BENCH, DEVICE, SHAPE, *METRICS, STATUS, MESSAGE)
# api_precision_compare of 26.2.0 takes a row that has RELATIVE for one of the absolute standard
# ratio of two results: its column, that of its verdict, the name of the ratio
RATIO_COLUMNS = (
    ("小值域错误比值", "小值域判定结果", "small_wrong"),
    ("均方根误差比值", "均方根误差判定结果", "rmse"),
    ("相对误差最大值比值", "相对误差最大值判定结果", "largest_relative"),
    ("相对误差平均值比值", "相对误差平均值判定结果", "mean_relative"),
    ("误差均衡性比值", "误差均衡性判定结果", "balance"),
)
# numbers of the first result alone: column, that of its verdict, field of Metrics
OWN_COLUMNS = (
    (NOT_FINITE, "inf/nan判定结果", "not_finite"),
    (RELATIVE, "相对误差判定结果", "relative_wrong"),
    (ABSOLUTE, "绝对误差判定结果", "small_wrong"),
    ("二进制一致错误率", "二进制一致错误率判定结果", "unequal"),
)
ULP_COLUMNS = ("ULP误差平均值", "ULP误差大于阈值占比", "ULP误差大于阈值占比比值", "ULP误差判定结果")
THOUSANDTH_COLUMNS = ("双千指标", "双千指标判定结果")
OUTCOME, ALGORITHM = "比对结果", "比对算法"
PRECISION_COLUMNS = (
    NAME,
    *(column for ratio in RATIO_COLUMNS for column in ratio[:2]),
    *(column for own in OWN_COLUMNS for column in own[:2]),
    *ULP_COLUMNS,
    *THOUSANDTH_COLUMNS,
    *(OUTCOME, ALGORITHM, MESSAGE),
)
ALGORITHMS = {
    "absolute": "绝对阈值法",
    "binary": "二进制一致法",
    "ulp": "ULP误差比对法",
    "thousandth": "双千指标法",
    "benchmark": "标杆比对法",
    "accumulative": "累积误差比对法",
}


def number(value: float | None, digits: int = 14) -> str:
    """Return a number as these files hold it, blank where it is not known; digits: how many of it are significant."""
    return BLANK if value is None else f"{value:.{digits}g}"


def metrics_of(record: dict[str, str]) -> Metrics:
    """Return what a row of a details file holds. Raises ValueError for what is no number."""
    known = {field: float(record[column]) for column, field in METRICS.items() if (record.get(column) or BLANK).strip()}
    return Metrics(**known)
