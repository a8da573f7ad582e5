"""How known trainers print their loss, as regular expressions with groups named step and loss."""

import re

_NUMBER = r"[-+]?(?:nan|inf|[\d.]+(?:[eE][-+]?\d+)?)"
PRESETS = {
    # karpathy/nanoGPT, train.py: "iter 100: loss 2.3456, time 93.11ms, mfu 12.34%"
    "nanogpt": rf"(?:^|\s)iter (?P<step>\d+): loss (?P<loss>{_NUMBER})",
    # karpathy/llm.c: main.log "s:12 trl:3.4567 lr:...", the screen "step   12/19560 | loss 3.45 ..."
    "llmc": rf"^(?:s:|step\s+)(?P<step>\d+)(?:/\d+)?[ |:]+(?:trl:|(?:train )?loss )(?P<loss>{_NUMBER})",
    # NVIDIA/Megatron-LM: " iteration      100/  500000 | ... | lm loss: 6.400000E+00 | ..."
    "megatron": rf"iteration\s+(?P<step>\d+)/\s*\d+ \|.*\| lm loss: (?P<loss>{_NUMBER})",
}


def expression_of(pattern: str | None, preset: str | None) -> re.Pattern[str]:
    """The pattern, or that of a preset, compiled.

    Raises:
        ValueError: both, an unknown preset, or a pattern without groups named step and loss.
    """
    if pattern is not None and preset is not None:
        raise ValueError("expected a pattern or a preset, got both")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"expected a preset of {', '.join(PRESETS)}, got {preset!r}")
    text = PRESETS[preset] if preset is not None else pattern or ""
    try:
        expression = re.compile(text)
    except re.error as problem:
        raise ValueError(f"expected a regular expression, got {text!r}: {problem}") from problem
    if not {"step", "loss"} <= expression.groupindex.keys():
        raise ValueError(f"expected groups (?P<step>...) and (?P<loss>...) in the pattern, got {text!r}")
    return expression
