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


def token_names(tokens: Sequence[str]) -> list[str]:
    r"""Single tokens of one vocabulary, with a dot for the space before or after a word.

    Bytes of a character that a token has only a part of are written as numbers. Whether characters
    are bytes is seen in all tokens together.

    Example:
        >>> token_names(["\u0120M\u00c3\u00a4d", "\u0120\u00c3", "\u00a4d"])
        ['·Mäd', '·<c3>', '<a4>d']
        >>> token_names(["▁M", "ä"])
        ['·M', 'ä']
    """
    byte_level = any(ord(character) >= 0x100 for token in tokens for character in token) and all(
        character in _BYTES for token in tokens for character in token
    )
    named = [_spelled(token, byte_level) or readable([token])[0] for token in tokens]
    return [name.replace(" ", "·").replace("\n", "↵").replace("\t", "→") for name in named]


def _spelled(token: str, byte_level: bool) -> str | None:
    """The text that the bytes of a token are; None if its characters are not bytes."""
    if token.endswith(_WORD_END) or any(character not in _BYTES for character in token):
        return None
    codes = bytes(_BYTES[character] for character in token)
    # Only the first bytes can continue a character, and only the last ones can begin one.
    rest = codes.lstrip(bytes(range(0x80, 0xC0)))
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(rest)
    except UnicodeDecodeError:
        return token
    begun, _ = decoder.getstate()
    ended = codes[: len(codes) - len(rest)]
    if (begun or ended) and not byte_level:
        return token
    before, after = ("".join(f"<{byte:02x}>" for byte in part) for part in (ended, begun))
    return f"{before}{text}{after}"


def token_name(token: str) -> str:
    """One token as :func:`token_names` shows it."""
    return token_names([token])[0]
