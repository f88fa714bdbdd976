"""The tokenizer of a Hugging Face folder on this machine. No code of the folder is run."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import RequestError
from .batching import text_digest
from .subwords import panics_refused


def pretrained_tokenizer(folder: str | Path, *, fast: bool = True) -> Any:
    """The tokenizer of a folder.

    ``fast``: it must be one of the library ``tokenizers``. Those of Marian and M2M100 are not; they
    need the package sentencepiece.
    """
    from transformers import AutoTokenizer

    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder; a tokenizer is a folder on this machine")
    if not fast and _lacks_sentencepiece(folder):
        raise RequestError(
            f"{folder}: its tokenizer needs a package: pip install 'torch-labo[sentencepiece]'"
        )
    try:
        with panics_refused(folder):
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # of many kinds, from several libraries
        reason = str(error).partition("\n")[0]
        raise RequestError(f"{folder}: holds no tokenizer that can be loaded ({reason})") from error
    if fast and not tokenizer.is_fast:
        raise RequestError(f"{folder}: its tokenizer has no tokenizer.json (a fast tokenizer)")
    if tokenizer.eos_token_id is None:
        raise RequestError(f"{folder}: its tokenizer has no token that ends a text (eos_token)")
    return tokenizer


def _lacks_sentencepiece(folder: Path) -> bool:
    """Whether only the package sentencepiece could read the tokenizer, and it is not installed."""
    if (folder / "tokenizer.json").is_file() or find_spec("sentencepiece") is not None:
        return False
    return any(folder.glob("*.spm")) or any(folder.glob("*.model"))


def vocabulary_digest(tokenizer: Any) -> str:
    """A name for the tokens of a tokenizer and their ids."""
    return text_digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def vocabulary_size(tokenizer: Any) -> int:
    """The largest id of a tokenizer, plus 1."""
    languages = getattr(tokenizer, "lang_code_to_id", {})  # M2M100 may not count them
    return 1 + max(chain(tokenizer.get_vocab().values(), languages.values()))


def vocabulary_difference(one: Any, other: Any) -> str:
    """How two tokenizers differ: their sizes, and the first token that is not the same."""
    sizes = f"{len(one)} and {len(other)} types"
    for token in range(min(len(one), len(other))):
        names = [tokenizer.convert_ids_to_tokens(token) for tokenizer in (one, other)]
        if names[0] != names[1]:
            return (
                f"{sizes}; the first token that differs is {token}, {names[0]!r} and {names[1]!r}"
            )
    return sizes
