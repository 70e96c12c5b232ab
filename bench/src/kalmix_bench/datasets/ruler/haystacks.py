"""Haystacks of RULER's tasks, and the words that keys are made of."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import overload

from kalmix.errors import ArgumentError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_BUILTIN_WORDS = {
    "adjective": """
able amber ample azure bitter bold brave brief bright brisk broad calm candid careful cheerful clean
clear clever cold cool coral crisp curly dapper daring deep dense distant dusty eager early earnest easy elder
elegant even faint fair famous fancy fast fierce fine firm flat fluent fond formal frank fresh frosty full gentle
giant glad golden good grand grateful great green happy hardy hazel heavy high hollow honest humble icy ideal jolly
keen kind large late lean light little lively local lone long loud loyal lucid lucky mellow merry mild mindful misty
modest narrow neat new nimble noble novel old open pale patient plain polite proud pure quick quiet rapid rare ready
ripe robust round royal rusty safe salty sharp short silent silver simple slow small smooth soft solid sour square
stable steady steep stern still stout strong sturdy sunny sweet swift tall tame tender thin tidy tiny tough true vast
vivid warm wary wide wild wise witty young zesty""",
    "noun": """
acorn anchor antler apple arch armor arrow aspen atlas autumn badger bamboo banjo barley barrel basin basket
beacon bear beaver beetle bell berry birch bison blossom boat book bottle boulder branch bread brick bridge brook
broom bucket butter button cabin cactus camel candle canoe canyon carpet carrot castle cedar cello chalk cherry chest
circle cliff clock cloud clover coast comet compass copper corner cotton crane crater cricket crown curtain daisy
dolphin donkey door dragon drum eagle ember engine falcon feather fern ferry fiddle field finch flame flint forest
fossil fountain fox galaxy garden garnet glacier goblet granite harbor hazelnut helmet heron hill honey horizon
island ivory jacket jasmine jewel jungle kettle kite ladder lagoon lake lantern lemon lily lobster locket lotus magnet
mango maple marble meadow melon mirror moon moss mountain needle nest oak oasis ocean olive onion orchard otter owl
paddle palace panda parrot path pearl pebble pepper piano pillow pine planet plum pond poppy prairie puppet quartz
rabbit rain raven reef ribbon river robin rocket rose saddle sail salmon sand shadow shell ship silk sparrow spoon
spring spruce squirrel star stone storm stream summit sun swan table temple thistle thunder tiger timber trail train
tree tulip tunnel turtle valley velvet village violin walnut water whale wheel willow window winter wolf""",
    "verb": """
add ask bake bend blend boil borrow build call carry carve catch climb collect compare count cross cure cut
dance dig draw drift drink drive earn explain find fix float fold follow gather give glow greet grow guess guide hear
help hide hold hum hunt jump keep knit know laugh lead learn lift listen look make march measure meet mend mix move
offer pack paint pick plant play pour print pull push read repair rest ride row run sail save say sew shape share
shine sing sit sketch sleep smile solve sort speak spin stand stir swim teach tell think throw touch trade travel
try turn visit wait walk wash watch weave whisper win wonder work write""",
}


class WordPairs(Sequence[str]):
    """Sorted sequence of all distinct strings "adjective-noun".

    Items are computed on access: the package wonderwords gives six million of them.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self._nouns = sorted(set(nouns))
        groups: list[list[str]] = []  # prefixes; within a group, each starts with the group's first one
        for beginning in sorted({f"{adjective}-" for adjective in adjectives}):
            if groups and beginning.startswith(groups[-1][0]):
                groups[-1].append(beginning)
            else:
                groups.append([beginning])
        self._groups = [self._begun(group) if len(group) > 1 else group[0] for group in groups]
        sizes = (len(self._nouns) if isinstance(group, str) else len(group) for group in self._groups)
        self._ends = list(accumulate(sizes))

    def _begun(self, beginnings: list[str]) -> list[str]:
        return sorted({beginning + noun for beginning in beginnings for noun in self._nouns})

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, position: int) -> str: ...
    @overload
    def __getitem__(self, position: slice) -> list[str]: ...
    def __getitem__(self, position: int | slice) -> str | list[str]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        position = range(len(self))[position]
        at = bisect(self._ends, position)
        group, within = self._groups[at], position - (self._ends[at - 1] if at else 0)
        return group + self._nouns[within] if isinstance(group, str) else group[within]


@cache
def load_words(source: str) -> tuple[WordPairs, list[str]]:
    """Return word pairs for keys, and the sorted list of single words.

    Args:
        source: "wonderwords" for the package of this name, "builtin" for the short list of this module.

    Raises:
        ArgumentError: the package is not installed.
    """
    kinds = ("adjective", "noun", "verb")
    words = [_BUILTIN_WORDS[kind].split() if source == "builtin" else _wonderwords(f"{kind}list.txt") for kind in kinds]
    return WordPairs(words[0], words[1]), sorted(set().union(*words))


def _wonderwords(file: str) -> list[str]:
    try:
        text = (resources.files("wonderwords") / "assets" / file).read_text(encoding="utf-8")
    except ModuleNotFoundError:
        hint = "Install it with `pip install wonderwords`"
        problem = "is 'wonderwords', a package that is not installed"
        raise ArgumentError("words", problem=problem, expected="'builtin'", hint=hint) from None
    return [word.rstrip() for word in text.splitlines()]


@cache
def essay(path: str) -> tuple[str, ...]:
    """Return the words of the text file at `path`; of Python's language reference if `path` is empty.

    RULER uses essays by Paul Graham, which are not distributed here. The reference differs between Python versions.

    Raises:
        ArgumentError: there is no such text.
    """
    expected = "the path of a UTF-8 text file"
    if path:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError("essay", got=f"{path!r}, which cannot be read ({error})", expected=expected) from None
    else:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ArgumentError(
                "essay", problem="is not given, and this Python lacks pydoc_data", expected=expected
            ) from None
        text = " ".join(topic for _, topic in sorted(topics.items()))
    words = tuple(text.split())
    if not words:
        raise ArgumentError("essay", got=f"{path!r}, which is empty", expected=expected)
    return words


def split_sentences(text: str) -> list[str]:
    """Split a text after full stops, question marks and exclamation marks that precede a space. RULER uses NLTK's
    Punkt.
    """
    return re.split(r"(?<=[.?!]) +", text.strip())
