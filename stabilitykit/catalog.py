"""Every metric: key, unit, which way is bad, threshold with its source; ARM stands for any arm.

The README's table, the report's panels and its sentences are made from this list; a key that is not
here is not written by any monitor (a test holds that).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Metric:
    """One key and what it means. `threshold` maps a dtype name, or "any", to the value that is bad."""

    key: str
    unit: str
    bad: str  # "high", "low" or "" (context, never judged)
    meaning: str
    threshold: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def limit(self, dtype: str = "any") -> float | None:
        """The threshold for values measured in `dtype`, None when the metric is not judged."""
        return self.threshold.get(dtype, self.threshold.get("any"))


# Healthy controls as `study deviation` runs them (plain and flash, T 256, q and k of deviation .1 to 8, which
# is very sharp), 12 seeds, all rows: worst 2.1 in bfloat16, 2.8 in float16, 13 in float32; 32 rows of one
# head: 4.5, 3.7 and 54, which is why an event needs three of five looks. Healthy bfloat16 training of
# gpt-nano, all heads and rows, 6 steps from 0 to 59: worst 1.6. In float32 a kernel that rounds its inputs
# to TF32 reads above 5,000, a scale .1 % off above 500 in dq.
_ROUNDOFF = {"bfloat16": 3.0, "float16": 3.0, "float32": 200.0}
_ROUNDOFF_SOURCE = "healthy controls over input scales; idea of TTrace, arXiv 2506.09280"
# A walk of healthy roundings stays within its own deviation: 2.5 at most in 12 steps of all layers and heads.
_BIAS = {"any": 8.0}
_FLASH_TESTS = "flash-attention tests: out within 2x, gradients within 3x of plain attention's error"

# Healthy rings as tests/callbacks/test_ring_healthy.py runs them (all layouts, q and k of deviation .1 to 8,
# grouped heads, a window, values that share a mean; 8 rows of each rank; 6 seeds on 1 and 2 ranks, and on 3
# but in float16; 1 seed on 3 in float16 and on 4): worst roundoff ratio 1.5 in bfloat16, 1.6 in float16, 73
# in float32; key_sum 6.2e-4, 7.1e-5, 8.7e-8; value_sum 1.2e-3, 1.5e-4, 1.3e-6; query_key 1.8e-5, 2.6e-6,
# 2.3e-9; out_value 6.1e-5, 1.1e-5, 1.2e-7. Limits of the identities are eight times that and more.
_RING = {
    "key_sum": {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-5},
    "value_sum": {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-4},
    "query_key": {"bfloat16": 3e-4, "float16": 5e-5, "float32": 1e-6},
    "out_value": {"bfloat16": 1e-3, "float16": 2e-4, "float32": 1e-5},
}
_RING_SOURCE = "healthy controls over layouts, ranks and input scales"

_COSTS = {
    "attention": "AttentionMonitor",
    "loss": "LossMonitor",
    "precursors": "PrecursorMonitor",
    "ring": "RingMonitor",
    "weights": "WeightMonitor",
    "total": "all monitors",
}

METRICS: tuple[Metric, ...] = (
    Metric(
        "loss/value",
        "nats",
        "high",
        "loss of the optimizer step: mean over its micro-batches and ranks, weighted by tokens where the "
        "module says how many",
    ),
    Metric("loss/grad_norm", "", "high", "L2 norm of all gradients, unscaled, before clipping"),
    Metric(
        "loss/score",
        "robust sigmas",
        "high",
        "how far the loss is above its own recent median, in robust standard deviations",
    ),
    Metric(
        "loss/spike_score",
        "%",
        "high",
        "share of the last 1000 losses at least 7 standard deviations off the mean of the 1000 before",
        source="OLMo 2, arXiv 2501.00656",
    ),
    Metric(
        "loss/event", "count", "high", "1 on a step at which an event of the loss was raised", {"any": 1.0}
    ),
    Metric(
        "loss/skipped",
        "count",
        "high",
        "1 on a step whose update was not made: by action `skip`, or because float16 overflowed",
    ),
    Metric("loss/scale", "", "low", "GradScaler's loss scale after the step, under float16"),
    Metric(
        "attention/roundoff_ratio",
        "ratio",
        "high",
        "error of the kernel's output over how far the exact output moves when q, k, v and the stored "
        "output move by one roundoff; near 1 is as good as the format allows on this very input",
        _ROUNDOFF,
        _ROUNDOFF_SOURCE,
    ),
    Metric("attention/rel_l2", "ratio", "", "||fast - exact|| / ||exact|| of the output"),
    Metric(
        "attention/max_abs",
        "",
        "",
        "largest |fast - exact| of the output (arXiv 2405.02803, Sec. IV)",
    ),
    Metric(
        "attention/error_constant",
        "ratio",
        "",
        "max|fast - exact| / (u max|exact|), u the unit roundoff of the kernel's format",
    ),
    Metric(
        "attention/error_vs_baseline",
        "ratio",
        "",
        "max error of the kernel over max error of plain attention in the same format; below 2 passes "
        "flash-attention's own tests",
        source=_FLASH_TESTS,
    ),
    Metric(
        "attention/sign_bias",
        "ulp",
        "",
        "mean error away from zero (> 0) or towards it (arXiv 2510.04212)",
    ),
    Metric(
        "attention/max_logit",
        "",
        "",
        "largest scaled q.k; runs with values above 1e4 diverged",
        source="arXiv 2309.14322, Sec. 3.1",
    ),
    Metric(
        "attention/logit_bound",
        "",
        "",
        "largest |q| |k| scale over all heads and rows: no logit, measured or not, is above it",
    ),
    Metric(
        "attention/entropy",
        "share",
        "",
        "mean entropy of attention rows over the log of the keys they see; 0 is collapsed (worst: lowest)",
        source="arXiv 2303.06296",
    ),
    Metric(
        "attention/repeated_max",
        "share",
        "",
        "share of rows whose scores, in the kernel's format, have two or more equal maxima",
        source="arXiv 2510.04212, Sec. 4",
    ),
    Metric(
        "attention/probability_one",
        "share",
        "",
        "share of rows in which one of several keys gets a probability that rounds to exactly 1",
        source="arXiv 2510.04212, Sec. 4",
    ),
    Metric(
        "attention/delta_bias",
        "sigmas",
        "high",
        "running sum of delta = rowsum(dO O) by the stored output minus by the exact one, over its size "
        "if it were random; stays near 0 without a bias, grows with one, to either side",
        _BIAS,
        "5 sigmas of a random walk, and room; mechanism of arXiv 2510.04212, Sec. 3",
    ),
    Metric(
        "attention/nonfinite",
        "count",
        "high",
        "NaN or inf in the kernel's output where the exact output is finite",
        {"any": 1.0},
    ),
    Metric(
        "attention/grad_roundoff_ratio",
        "ratio",
        "high",
        "the same as roundoff_ratio for dq, dk and dv, the worst of them",
        _ROUNDOFF,
        _ROUNDOFF_SOURCE,
    ),
    Metric(
        "attention/grad_rel_l2",
        "ratio",
        "",
        "||fast - exact|| / ||exact|| of dq, dk, dv, the worst",
    ),
    Metric(
        "attention/grad_error_vs_baseline",
        "ratio",
        "",
        "max error of the kernel's gradients over autograd's of plain attention, the worst of dq, dk, dv",
        source=_FLASH_TESTS,
    ),
    Metric(
        "attention/grad_nonfinite",
        "count",
        "high",
        "NaN or inf in dq, dk, dv where the exact gradient is finite",
        {"any": 1.0},
    ),
    Metric(
        "weights/ARM/w1",
        "",
        "",
        "Wasserstein-1 distance between the run's weights and the twin's, each as one heap of numbers; "
        "blind to which weight moved where",
        source="arXiv 2405.02803, Sec. V",
    ),
    Metric(
        "weights/ARM/max_abs",
        "",
        "",
        "largest difference of one weight between the run and the twin",
        source="arXiv 2405.02803, Sec. V",
    ),
    Metric("weights/ARM/rel_l2", "ratio", "", "||twin - run|| / ||run|| over all weights"),
    Metric("weights/ARM/cosine", "", "", "cosine between the run's weights and the twin's"),
    Metric(
        "weights/ARM/w1_over_floor",
        "floors",
        "",
        "w1 over the median w1 of twins that differ by one ulp at the fork: the noise floor",
    ),
    Metric(
        "weights/ARM/rel_l2_over_floor",
        "floors",
        "",
        "rel_l2 over the floor's median; near 1 the arm is not distinguishable from rounding noise",
    ),
    Metric(
        "precursors/update_ratio",
        "ratio",
        "high",
        "||change of the weights in this step|| / ||weights|| of a layer, on a sample of its weights; the "
        "largest",
    ),
    Metric(
        "precursors/rms",
        "ratio",
        "high",
        "RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of a tensor, the largest: far above 1, Adam's second "
        "moment v is stale; spikes follow within 1 to 8 steps",
        source="arXiv 2304.13013, Sec. 3",
    ),
    Metric(
        "precursors/entropy",
        "share",
        "",
        "as attention/entropy: mean over all heads of a layer, 16 rows of 4 sequences; the lowest",
        source="arXiv 2303.06296",
    ),
    Metric(
        "precursors/max_logit",
        "",
        "",
        "as attention/max_logit: over all heads of a layer, 16 rows of 4 sequences; the largest",
        source="arXiv 2309.14322, Sec. 3.1",
    ),
    Metric(
        "precursors/eps_share",
        "share",
        "high",
        "share of a layer's gradients below Adam's eps, zeros included; the largest",
        source="arXiv 2304.09871",
    ),
    Metric(
        "precursors/log_z",
        "nats",
        "",
        "mean log of the output's softmax denominator; drifts far below 0 when output logits diverge",
        source="arXiv 2309.14322, Sec. 3.2",
    ),
    Metric(
        "precursors/outlier",
        "ratio",
        "high",
        "largest activation of a layer over its median; massive ones are about 1000",
        source="arXiv 2402.17762",
    ),
    Metric("precursors/max_weight", "", "high", "largest |weight| of a layer; the largest"),
    Metric("precursors/loss_scale", "", "low", "GradScaler's factor, where there is one"),
    Metric(
        "precursors/grad_norm",
        "",
        "high",
        "L2 norm of a layer's gradients, unscaled, before clipping; the largest",
    ),
    Metric(
        "precursors/moved",
        "count",
        "",
        "signals of layers that are outside the robust band of their own past",
    ),
    Metric(
        "ring/roundoff_ratio",
        "ratio",
        "high",
        "as attention/roundoff_ratio, of attention across ranks: a few rows of each rank, the exact output "
        "over the keys of all",
        _ROUNDOFF,
        _RING_SOURCE,
    ),
    Metric(
        "ring/grad_roundoff_ratio",
        "ratio",
        "high",
        "the same of dq, on the same rows",
        _ROUNDOFF,
        _RING_SOURCE,
    ),
    Metric("ring/rel_l2", "ratio", "", "||ring - exact|| / ||exact|| of those rows' output"),
    Metric("ring/grad_rel_l2", "ratio", "", "||ring - exact|| / ||exact|| of their dq"),
    Metric(
        "ring/row_mass",
        "",
        "high",
        "largest |sum of a row's probabilities over all ranks - 1|",
        {"any": 1e-3},
        "1e-5 at most with float32 log-sum-exps; a lost or stale part: above 0.1",
    ),
    Metric(
        "ring/key_sum",
        "ratio",
        "high",
        "||dK summed over all tokens||, which must be 0, over the size of the terms",
        _RING["key_sum"],
        _RING_SOURCE,
    ),
    Metric(
        "ring/value_sum",
        "ratio",
        "high",
        "||dV - dO, each summed over all tokens||, which must be 0, over the size of the terms",
        _RING["value_sum"],
        _RING_SOURCE,
    ),
    Metric(
        "ring/query_key",
        "ratio",
        "high",
        "|<dQ, Q> - <dK, K>| of a key head over all tokens, which must be 0, over the size of the terms",
        _RING["query_key"],
        _RING_SOURCE,
    ),
    Metric(
        "ring/out_value",
        "ratio",
        "high",
        "|<O, dO> - <dV, V>| of a key head over all tokens, which must be 0, over the size of the terms",
        _RING["out_value"],
        _RING_SOURCE,
    ),
    Metric(
        "ring/transport",
        "count",
        "high",
        "hops at which a block of keys and values did not arrive, bit for bit, as it was sent",
        {"any": 1.0},
    ),
    Metric(
        "ring/imbalance",
        "ratio",
        "",
        "tiles of scores that the busiest rank computed, over the mean of all ranks; counted, not timed",
        source="arXiv 2311.09431, Sec. 2.2",
    ),
    Metric(
        "ring/wait_percent",
        "%",
        "",
        "time the rank that waited most spent waiting for blocks, of its time in the rings' rounds",
    ),
    *(
        Metric(f"overhead/{kind}_percent", "%", "high", f"time {who} took, of the run without monitors")
        for kind, who in _COSTS.items()
    ),
)

CATALOG: dict[str, Metric] = {metric.key: metric for metric in METRICS}


def metric_of(key: str) -> Metric:
    """The metric of a key as written, whatever its arm.

    >>> metric_of("weights/float32/w1").key
    'weights/ARM/w1'

    Raises:
        KeyError: a key outside the catalog.
    """
    head, *_, last = key.split("/")
    return CATALOG[key] if key in CATALOG else CATALOG[f"{head}/ARM/{last}"]


def family(name: str) -> list[Metric]:
    """The metrics whose key begins with `name/`, in the order they are shown.

    >>> [metric.key for metric in family("loss")][:2]
    ['loss/value', 'loss/grad_norm']
    """
    return [metric for metric in METRICS if metric.key.startswith(name + "/")]


def markdown_table() -> str:
    """The README's table of what the numbers mean."""
    rows = ["| number | unit | what it says | bad from |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        limits = ", ".join(
            f"{value:g}" + ("" if dtype == "any" else f" ({dtype})")
            for dtype, value in metric.threshold.items()
        )
        source = f" [{metric.source}]" if metric.source else ""
        rows.append(f"| `{metric.key}` | {metric.unit} | {metric.meaning}{source} | {limits} |")
    return "\n".join(rows)
