"""What to show of a run, declared once: the page and the workspaces of loggers are made from it."""

from dataclasses import dataclass
from typing import Literal

from stabilitykit.catalog import family, metric_of

Form = Literal[
    "curve",
    "layers over time",
    "layer x head heat map",
    "arms over steps",
    "distance per tensor",
    "rank bars",
    "cost bars",
]
_WORDS = {"grad": "gradient", "rel": "relative", "l2": "L2", "w1": "W1", "rms": "RMS", "log": "log", "z": "Z"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: catalog `keys` of one record `kind`, drawn in one `form`; ARM stands for every arm."""

    title: str
    kind: str
    keys: tuple[str, ...]
    form: Form

    @property
    def help(self) -> tuple[str, ...]:
        """One sentence per key: what the number means, in the catalog's words."""
        return tuple(explain(key) for key in self.keys)


# Record kind -> section of the page; a new family is one line here and its panels below.
SECTIONS: dict[str, str] = {
    "loss": "Loss",
    "attention": "Attention",
    "ring": "Attention across ranks",
    "weights": "Weights",
    "precursors": "Precursors",
    "overhead": "Cost of watching",
}

PANELS: tuple[Panel, ...] = (
    Panel(
        "Loss, gradient norm and score",
        "loss",
        ("loss/value", "loss/grad_norm", "loss/score"),
        "curve",
    ),
    Panel(
        "Spike score, skipped updates, loss scale",
        "loss",
        ("loss/spike_score", "loss/skipped", "loss/scale"),
        "curve",
    ),
    Panel(
        "Deviation of the output, per layer",
        "attention",
        ("attention/roundoff_ratio",),
        "layers over time",
    ),
    Panel(
        "Deviation of the gradients, per layer",
        "attention",
        ("attention/grad_roundoff_ratio",),
        "layers over time",
    ),
    Panel(
        "Layers and heads",
        "attention",
        (
            "attention/roundoff_ratio",
            "attention/grad_roundoff_ratio",
            "attention/rel_l2",
            "attention/max_logit",
            "attention/logit_bound",
            "attention/entropy",
            "attention/repeated_max",
            "attention/delta_bias",
        ),
        "layer x head heat map",
    ),
    Panel("Largest logit, per layer", "attention", ("attention/max_logit",), "layers over time"),
    Panel("Attention entropy, per layer", "attention", ("attention/entropy",), "layers over time"),
    Panel(
        "Rows with repeated maxima, per layer",
        "attention",
        ("attention/repeated_max",),
        "layers over time",
    ),
    Panel("Bias of delta, per layer", "attention", ("attention/delta_bias",), "layers over time"),
    Panel("Deviation across ranks, per layer", "ring", ("ring/roundoff_ratio",), "layers over time"),
    Panel(
        "Deviation of dq across ranks, per layer", "ring", ("ring/grad_roundoff_ratio",), "layers over time"
    ),
    Panel(
        "Layers and heads across ranks",
        "ring",
        ("ring/roundoff_ratio", "ring/grad_roundoff_ratio", "ring/rel_l2", "ring/grad_rel_l2"),
        "layer x head heat map",
    ),
    *(
        Panel(f"Identity: {title}, per layer", "ring", (f"ring/{name}",), "layers over time")
        for name, title in {
            "row_mass": "a row's probabilities sum to 1",
            "key_sum": "dK sums to 0",
            "value_sum": "dV sums to dO's sum",
            "query_key": "dQ and dK agree",
            "out_value": "dV and the output agree",
        }.items()
    ),
    Panel(
        "Blocks damaged on their way, imbalance, waiting",
        "ring",
        ("ring/transport", "ring/imbalance", "ring/wait_percent"),
        "curve",
    ),
    Panel("Work and waiting of each rank", "ring", ("ring/imbalance", "ring/wait_percent"), "rank bars"),
    Panel(
        "Distance of each twin from the run, in noise floors",
        "weights",
        ("weights/ARM/rel_l2_over_floor", "weights/ARM/w1_over_floor"),
        "arms over steps",
    ),
    Panel(
        "Relative L2 distance and the noise floor",
        "weights",
        ("weights/ARM/rel_l2",),
        "arms over steps",
    ),
    Panel("W1 distance and the noise floor", "weights", ("weights/ARM/w1",), "arms over steps"),
    Panel(
        "Relative L2 distance, per tensor",
        "weights",
        ("weights/ARM/rel_l2",),
        "distance per tensor",
    ),
    Panel(
        "Output, loss scale, and signals outside their band",
        "precursors",
        ("precursors/moved", "precursors/log_z", "precursors/loss_scale"),
        "curve",
    ),
    *(
        Panel(f"{title}, per layer", "precursors", (f"precursors/{name}",), "layers over time")
        for name, title in {
            "update_ratio": "Update over weight",
            "rms": "RMS of gradients over their second moment",
            "grad_norm": "Gradient norm",
            "max_logit": "Largest logit of all heads",
            "entropy": "Mean attention entropy",
            "outlier": "Activation outliers",
            "eps_share": "Gradients below eps",
            "max_weight": "Largest weight",
        }.items()
    ),
    Panel(
        "Time taken by each monitor",
        "overhead",
        tuple(metric.key for metric in family("overhead")),
        "cost bars",
    ),
)


def name_of(key: str) -> str:
    """The key's last part, as a reader says it; a family's plain value has the family's name.

    >>> name_of("attention/grad_roundoff_ratio"), name_of("loss/value"), name_of("weights/float32/rel_l2")
    ('gradient roundoff ratio', 'loss', 'relative L2')
    """
    words = key.removesuffix("/value").rpartition("/")[2].removesuffix("_percent").split("_")
    return " ".join(_WORDS.get(word, word) for word in words)


def explain(key: str) -> str:
    """One sentence: the key's name and meaning, with unit and source where there are any."""
    metric = metric_of(key)
    source = f" [{metric.source}]" if metric.source else ""
    unit = f" ({metric.unit})" if metric.unit else ""
    name = name_of(key)
    return f"{name[0].upper()}{name[1:]}{unit}: {metric.meaning}{source}."
