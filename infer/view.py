"""One answer in colours: which pass fixed which token.

    print(render_ansi(token_texts(tokenizer, output.token_ids), output.commit_lengths))

All tokens that one pass committed share a colour; a long run of one colour is what Jacobi decoding gained there.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence

# Neighbours in hue stand far apart in the cycle, so that two passes in a row never look alike.
_ANSI_COLOURS = (153, 222, 157, 218, 189, 187, 159, 216)
_HTML_COLOURS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fbcfe8", "#ddd6fe", "#e7e5b8", "#a5f3fc", "#fed7aa")
_RESET = "\x1b[0m"


def render_ansi(tokens_text: Sequence[str], commit_lengths: Sequence[int], *, colour: bool | None = None) -> str:
    """Return the answer for a terminal, with a last line that counts passes and tokens.

    Args:
        tokens_text: text that each token adds (:func:`jacobi_llm.infer.detokenizer.token_texts`).
        commit_lengths: tokens fixed by each pass, in order.
        colour: 256 colours, or a ``|`` where a pass begins; None asks the environment (NO_COLOR, TERM).

    Raises:
        ValueError: the lengths do not add up to the number of tokens.
    """
    use_colour = _wants_colour() if colour is None else colour
    parts = []
    for number, text in enumerate(_texts_by_pass(tokens_text, commit_lengths)):
        visible = _visible(text)
        if use_colour:
            start = f"\x1b[48;5;{_ANSI_COLOURS[number % len(_ANSI_COLOURS)]}m\x1b[38;5;16m"
            # A background that is left on over a line break fills the rest of the line.
            parts.append("\n".join(f"{start}{line}{_RESET}" if line else "" for line in visible.split("\n")))
        else:
            parts.append(f"|{visible}" if number else visible)
    how = "one colour per pass" if use_colour else "| marks a new pass"
    return f"{''.join(parts).rstrip(chr(10))}\n{_legend(commit_lengths)} ({how})"


def render_html(tokens_text: Sequence[str], commit_lengths: Sequence[int], *, title: str = "Jacobi decoding") -> str:
    """Return one self-contained HTML page; a pass shows its number and size when pointed at.

    Args:
        tokens_text, commit_lengths: as in :func:`render_ansi`.
        title: heading of the page.

    Raises:
        ValueError: the lengths do not add up to the number of tokens.
    """
    spans = []
    for number, text in enumerate(_texts_by_pass(tokens_text, commit_lengths)):
        size = commit_lengths[number]
        tip = f"pass {number + 1}: {size} token{'' if size == 1 else 's'}"
        spans.append(f'<span class="p{number % len(_HTML_COLOURS)}" title="{tip}">{html.escape(_visible(text))}</span>')
    colours = "\n".join(f".p{index} {{ background: {colour}; }}" for index, colour in enumerate(_HTML_COLOURS))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #111;
  background: #fff; }}
pre {{ font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
span {{ border-radius: 3px; padding: 1px 0; }}
{colours}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>{_legend(commit_lengths)}. One colour is what one forward pass fixed.</p>
<pre>{"".join(spans)}</pre>
</body>
</html>
"""


def _texts_by_pass(tokens_text: Sequence[str], commit_lengths: Sequence[int]) -> Iterator[str]:
    if sum(commit_lengths) != len(tokens_text):
        raise ValueError(f"passes committed {sum(commit_lengths)} tokens, but {len(tokens_text)} texts are given")
    start = 0
    for length in commit_lengths:
        yield "".join(tokens_text[start : start + length])
        start += length


def _legend(commit_lengths: Sequence[int]) -> str:
    num_tokens, num_passes = sum(commit_lengths), len(commit_lengths)
    tpf = f"{num_tokens / num_passes:.2f}" if num_passes else "-"
    return f"{num_passes} passes, {num_tokens} tokens, TPF {tpf}"


def _wants_colour() -> bool:
    # https://no-color.org: set and not empty means no colour, whatever its value.
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _visible(text: str) -> str:
    """Show control characters as pictures: a model's text must not steer the terminal, and must stay one width."""
    return "".join(
        char
        if char.isprintable() or char in "\n\t"
        else (chr(0x2400 + ord(char)) if ord(char) < 32 else "\u2421" if char == "\x7f" else _other(char))
        for char in text
    )


def _other(char: str) -> str:
    return char if char.isspace() or ord(char) > 0x9F else "\N{REPLACEMENT CHARACTER}"
