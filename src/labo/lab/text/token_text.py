"""Subword tokens as text that people can read."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

# Byte-level BPE writes each byte as a character: printable bytes as themselves, the others as the
# characters from U+0100 on, in order.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)}
_WORD_END = "</w>"
SPACE = "▁"  # of SentencePiece


def readable(tokens: Sequence[str]) -> list[str]:
    """Tokens as pieces of text that are the sentence when joined.

    A character whose bytes are spread over several tokens is in the last of them.

    Example:
        >>> readable(["Ein", "\u0120M\u00c3\u00a4d", "chen", "</s>"])
        ['Ein', ' Mäd', 'chen', '</s>']
        >>> readable(["ein</w>", "Mäd", "chen</w>", "</s>"])
        ['ein ', 'Mäd', 'chen ', '</s>']
        >>> readable(["▁ein", "▁Mäd", "chen", "</s>"])
        [' ein', ' Mäd', 'chen', '</s>']
    """
    if any(token.endswith(_WORD_END) for token in tokens):
        return [_without_mark(token) for token in tokens]
    if any(token.startswith(SPACE) for token in tokens):
        return [token.replace(SPACE, " ") for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = []
    for token in tokens:
        spelled = [_BYTES.get(character) for character in token]
        pieces.append(token if None in spelled else decoder.decode(bytes(spelled)))  # type: ignore[arg-type]
    return pieces


def _without_mark(token: str) -> str:
    return f"{token.removesuffix(_WORD_END)} " if token.endswith(_WORD_END) else token


def token_name(token: str) -> str:
    """A single token, with a dot for the space before or after a word."""
    return readable([token])[0].replace(" ", "·") or token
