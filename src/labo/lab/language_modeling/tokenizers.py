"""The tokenizer of a language model: learned from text, or that of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..text.arrow import IGNORED
from ..text.subwords import SPECIAL_TOKENS, Merges, Size, learn_merges, make_tokenizer
from .documents import RawDocument, Render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What a chat looks like to a learned tokenizer, which has no template of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def learn_tokenizer(
    lines: Callable[[], Iterable[str]], vocabulary: int, *, chat: bool
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that begins each text with <s>."""
    merges = learn_merges(
        lines, words=False, size=Size(vocabulary=vocabulary), reserved=len(SPECIAL_TOKENS)
    )
    return _with_template(merges, chat)


def _with_template(merges: Merges, chat: bool) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(merges, (), frame="begin", split_special_tokens=not chat)
    tokenizer.model_max_length = 10**30  # as transformers says that there is no limit
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def begin_token(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token before the first one of a text: <s>, or, where there is none, </s>."""
    begin = tokenizer.bos_token_id
    return int(tokenizer.eos_token_id if begin is None else begin)


def chat_renderer(tokenizer: PreTrainedTokenizerFast | None) -> Render:
    """How a tokenizer writes a chat; None for one that is yet to be learned."""
    if tokenizer is None:
        tokenizer = _with_template(Merges(False, (), ()), chat=True)
    template = tokenizer.chat_template

    def render(messages: Sequence[Mapping[str, Any]], answer: bool) -> str:
        if template is None:
            raise DataError("its tokenizer has no chat template")
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer
        )
        return str(text)

    return render


def encode(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[RawDocument]
) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of documents, with the begin and end tokens of their kind.

    What is given is encoded by itself, as it will be when the model is asked to go on from it. What
    follows is encoded with it if that leaves its tokens as they are, else by itself.
    """
    prefixes = [
        "".join(part.text for part in document.parts[: number + 1])
        for document in documents
        for number in range(len(document.parts))
    ]
    alone = [part.text for document in documents for part in document.parts[1:]]
    chat = bool(documents) and documents[0].kind == "chat"
    whole, single = iter(_ids(tokenizer, prefixes, chat)), iter(_ids(tokenizer, alone, chat))
    begin, end = begin_token(tokenizer), int(tokenizer.eos_token_id)
    for document in documents:
        ids: list[int] = []
        labels: list[int] = []
        for number, part in enumerate(document.parts):
            new, by_itself = next(whole), next(single) if number else []
            new = new[len(ids) :] if new[: len(ids)] == ids else by_itself
            ids += new
            labels += new if part.learned else [IGNORED] * len(new)
        if document.kind == "chat":  # the template has them
            yield ids, labels
        else:
            yield [begin, *ids, end], [IGNORED, *labels, end]


def _ids(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], special: bool
) -> list[list[int]]:
    """The ids of texts; ``special`` says whether names of special tokens in them are such."""
    raw = tokenizer.backend_tokenizer
    raw.no_truncation()
    raw.no_padding()
    raw.encode_special_tokens = not special
    return [text.ids for text in raw.encode_batch_fast(list(texts), add_special_tokens=False)]
