"""Phrases of the Unicode CLDR through Babel: built-in parallel text, no download needed.

Dates, intervals, durations, amounts of units and currencies, lists of territories and languages:
one content, formatted in two languages. The words and their reordering are real, the reference is
exact, and there is a long tail, because names, units and currencies are drawn with a Zipf law. No
phrase occurs twice, so the validation and test splits share none with the training split.
"""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

from babel import Locale
from babel.dates import (
    format_date,
    format_interval,
    format_skeleton,
    format_time,
    format_timedelta,
    get_datetime_format,
)
from babel.lists import format_list
from babel.numbers import format_currency
from babel.units import UnknownUnitError, format_compound_unit, format_unit

from ..errors import DataError
from ..run.seeds import mix
from ..text.folder import FORMAT, cached_folder
from .cleaning import RawPair
from .options import Processing, parse_pairs
from .prepare import prepare_pairs
from .prepared import Pair, Prepared

LANGUAGES = ("de", "en", "fr")

_EDITION = 1  # of the phrases; another one makes other caches
_HELD_OUT = 500  # phrases for validation, and as many for the test
_PATIENCE = 100_000  # phrases drawn again and again before there are no others
_FIRST_DAY, _DAYS = datetime.date(1950, 1, 1), 75 * 365
_Time = Literal["year", "month", "week", "day", "hour", "minute", "second"]
_TIMES: tuple[_Time, ...] = get_args(_Time)
_SECONDS = dict(zip(_TIMES, (31_536_000, 2_592_000, 604_800, 86_400, 3600, 60, 1), strict=True))
_RATES = {
    "kilometer": ("hour", "second", "day", "liter"),
    "meter": ("second", "minute"),
    "liter": ("minute", "hour", "day", "kilometer"),
    "kilogram": ("hectare", "cubic-meter", "day", "week"),
    "gram": ("liter", "day", "cubic-centimeter"),
    "megabyte": ("second", "minute"),
}

Content = Callable[[str], str]  # formats one content in a language


class _Zipf:
    """Names in an order of the seed; the k-th is drawn with probability proportional to 1 / k."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self.names = random.Random(seed).sample(names, len(names))
        self._weights = list(accumulate(1 / k for k in range(1, len(names) + 1)))

    def draw(self, generator: random.Random) -> str:
        return generator.choices(self.names, cum_weights=self._weights)[0]

    def draw_several(self, generator: random.Random, count: int) -> list[str]:
        """Different names."""
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[self.draw(generator)] = None
        return list(drawn)


class _Phrasebook:
    """Draws contents. Things without a name in one of the languages are left out."""

    def __init__(self, seed: int) -> None:
        locales = [Locale(language) for language in LANGUAGES]

        def ranked(kind: str, names: Iterable[Iterable[Any]]) -> _Zipf:
            common = set.intersection(*map(set, names))
            return _Zipf(sorted(map(str, common)), mix(seed, "cldr", kind))

        territories = ([n for n in locale.territories if str(n).isalpha()] for locale in locales)
        self.territories = ranked("territories", territories)
        self.languages = ranked("languages", (locale.languages for locale in locales))
        self.currencies = ranked("currencies", (locale.currencies for locale in locales))
        self.units = ranked("units", map(_units, LANGUAGES))
        self.kinds: list[Callable[[random.Random], Content]] = [
            *[self.date] * 2,
            self.moment,
            *[self.interval] * 2,
            self.duration,
            self.relative_time,
            *[self.amount] * 2,
            self.rate,
            *[self.money] * 2,
            self.names_of_territories,
            self.names_of_languages,
            self.dialect,
            *[self.collection] * 8,
        ]

    def draw(self, generator: random.Random) -> Content:
        return generator.choice(self.kinds)(generator)

    def date(self, generator: random.Random) -> Content:
        day = _day(generator)
        form = generator.choice(("full", "full", "long", "yMMMEd", "MMMMd", "yMMMM", "yQQQQ"))
        if form in ("full", "long"):
            return lambda language: format_date(day, form, locale=language)
        moment = datetime.datetime.combine(day, datetime.time())
        return lambda language: format_skeleton(form, moment, locale=language)

    def moment(self, generator: random.Random) -> Content:
        day = _day(generator)
        time = datetime.time(generator.randrange(24), generator.randrange(0, 60, 5))
        forms: tuple[Literal["long", "full"], ...] = ("long", "full")
        form = generator.choice(forms)

        def content(language: str) -> str:
            pattern = str(get_datetime_format(form, locale=language)).replace("'", "")
            parts = {
                "{0}": format_time(time, "short", locale=language),
                "{1}": format_date(day, form, locale=language),
            }
            return re.sub(r"\{[01]\}", lambda m: parts[m[0]], pattern)

        return content

    def interval(self, generator: random.Random) -> Content:
        start = _day(generator)
        end = start + datetime.timedelta(days=generator.choice((1, 2, 3, 6, 13, 30, 61, 100, 200)))
        form = generator.choice(("yMMMd", "MMMd", "yMMMM", "yMMMEd", "MMMEd"))
        return lambda language: format_interval(start, end, form, locale=language)

    def duration(self, generator: random.Random) -> Content:
        first = generator.randrange(len(_TIMES) - 1)
        parts = [
            (_number(generator), unit)
            for unit in _TIMES[first : first + generator.choice((1, 2, 2, 3))]
        ]
        return lambda language: _list(
            language, [format_unit(n, f"duration-{unit}", locale=language) for n, unit in parts]
        )

    def relative_time(self, generator: random.Random) -> Content:
        unit = generator.choice(_TIMES)
        size = generator.choice((-1, 1)) * _number(generator) * _SECONDS[unit]
        delta = datetime.timedelta(seconds=size)
        return lambda language: format_timedelta(
            delta, granularity=unit, threshold=10_000, add_direction=True, locale=language
        )

    def amount(self, generator: random.Random) -> Content:
        size, unit = _quantity(generator), self.units.draw(generator)
        return lambda language: format_unit(size, unit, locale=language)

    def rate(self, generator: random.Random) -> Content:
        size, unit = _quantity(generator), generator.choice(sorted(_RATES))
        per = generator.choice(_RATES[unit])

        def content(language: str) -> str:
            text = format_compound_unit(size, unit, denominator_unit=per, locale=language)
            assert text is not None
            return text

        return content

    def money(self, generator: random.Random) -> Content:
        size, currency = _quantity(generator), self.currencies.draw(generator)
        form = "#,##0.##"
        return lambda language: format_currency(
            size, currency, form, locale=language, format_type="name", currency_digits=False
        )

    def names_of_territories(self, generator: random.Random) -> Content:
        return _names(generator, self.territories, lambda locale: locale.territories)

    def names_of_languages(self, generator: random.Random) -> Content:
        return _names(generator, self.languages, lambda locale: locale.languages)

    def dialect(self, generator: random.Random) -> Content:
        name, place = self.languages.draw(generator), self.territories.draw(generator)

        def content(language: str) -> str:
            locale = Locale(language)
            return f"{locale.languages[name]} ({locale.territories[place]})"

        return content

    def collection(self, generator: random.Random) -> Content:
        """Two or three contents of other kinds, joined."""
        kinds = [self.duration, self.amount, self.money, self.date, self.rate, self.dialect]
        count = generator.choice((2, 2, 3))
        parts = [generator.choice(kinds)(generator) for _ in range(count)]
        style = generator.choice(("standard", "or"))
        return lambda language: _list(language, [part(language) for part in parts], style)


def _day(generator: random.Random) -> datetime.date:
    """Mostly of late, sometimes long ago."""
    return _FIRST_DAY + datetime.timedelta(days=_DAYS - int(_DAYS * generator.random() ** 3))


def _number(generator: random.Random) -> int:
    """1 to 99; small ones are more frequent, as in Benford's law."""
    return int(10 ** (2 * generator.random()))


def _quantity(generator: random.Random) -> float:
    """A number up to a thousand, sometimes a half more, sometimes in thousands."""
    number = int(10 ** (3 * generator.random()))
    return generator.choice((number, number, number + 0.5, number * 1000))


def _names(generator: random.Random, known: _Zipf, names_in: Callable[[Locale], Any]) -> Content:
    names = known.draw_several(generator, generator.choice((1, 2, 3, 4)))
    style = generator.choice(("standard", "or"))
    return lambda language: _list(
        language, [names_in(Locale(language))[name] for name in names], style
    )


def _list(language: str, parts: Sequence[str], style: str = "standard") -> str:
    return format_list(parts, style, locale=language)  # type: ignore[arg-type]


def _units(language: str) -> set[str]:
    """The units for which an amount can be written out in a language."""
    units = set()
    for unit in Locale(language)._data["unit_patterns"]:
        try:
            text = format_unit(2, unit, locale=language)
        except UnknownUnitError:
            continue
        if unit not in text:  # which is how Babel says that it has no words for it
            units.add(unit)
    return units


# ------------------------------------------------------------------ data


def draw_phrases(
    pairs: Sequence[Pair], *, size: int, held_out: int, seed: int
) -> dict[str, list[RawPair]]:
    """Phrases of each split in two languages, none of them twice, and the number of their pair.

    There are ``size`` training phrases for each pair, ``held_out`` for validation and as many for
    the test. The seed determines the phrases, and which names are frequent.
    """
    book = _Phrasebook(seed)
    seen: set[str] = set()
    splits: dict[str, list[RawPair]] = {"train": [], "valid": [], "test": []}
    for number, pair in enumerate(pairs):
        generator = random.Random(mix(seed, "cldr", str(pair)))
        rows: list[RawPair] = []
        repeated = 0
        while len(rows) < size + 2 * held_out:
            if repeated == _PATIENCE:
                raise DataError(
                    f"data.size: there are only some {len(rows)} different phrases for {pair}"
                )
            repeated += 1
            content = book.draw(generator)
            source, target = (
                " ".join(content(language).split()) for language in (pair.source, pair.target)
            )
            if not {source, target} & seen:
                seen |= {source, target}
                rows.append((number, source, target))
                repeated = 0
        # At random, since frequent phrases come early and only once.
        generator.shuffle(rows)
        splits["valid"] += rows[:held_out]
        splits["test"] += rows[held_out : 2 * held_out]
        splits["train"] += rows[2 * held_out :]
    return splits


def cldr_data(
    languages: Sequence[str], *, size: int = 20_000, seed: int = 0, vocabulary: int = 2000
) -> Prepared:
    """The built-in phrases, prepared and kept in the cache folder of the user.

    ``size`` counts the training pairs of each direction.
    """
    for name in languages:
        if not set(name.split("-")) <= set(LANGUAGES):
            raise DataError(f"languages: {name!r} is not between two of {', '.join(LANGUAGES)}")
    try:
        pairs = parse_pairs(languages)
    except ValueError as error:
        raise DataError(f"languages: {error}") from error
    made_by = [version("babel"), version("tokenizers")]
    key = (_EDITION, FORMAT, made_by, list(languages), size, seed, vocabulary)

    def prepare(folder: Path) -> None:
        held_out = min(_HELD_OUT, size // 10)
        splits = draw_phrases(pairs, size=size, held_out=held_out, seed=seed)
        prepare_pairs(folder, pairs, splits, Processing(vocabulary=vocabulary))

    return Prepared(cached_folder(f"cldr-{'+'.join(languages)}", key, prepare))
