"""Keeps the libraries below us from writing lines and bars that no user asked for."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _is_wanted(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


# DeepSpeed writes this line to standard output, where our JSON goes, as soon as transformers or peft import it. A
# filter stays when DeepSpeed sets up its logger later; a level would be overwritten.
logging.getLogger("DeepSpeed").addFilter(_is_wanted)

_LOUD_LOGGERS = ("DeepSpeed", "huggingface_hub", "httpx", "filelock", "peft", "torch.distributed.elastic")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the block only errors of transformers, huggingface_hub, peft and DeepSpeed are logged; no bars are drawn.

    The previous levels are restored at the end, so that a program that embeds this package keeps its own settings.
    """
    from transformers.utils import logging as transformers_logging

    previous_levels = {name: logging.getLogger(name).level for name in _LOUD_LOGGERS}
    previous_verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    for name in _LOUD_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # peft reads attributes that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for name, level in previous_levels.items():
            logging.getLogger(name).setLevel(level)
        transformers_logging.set_verbosity(previous_verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
