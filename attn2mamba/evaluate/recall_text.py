"""Words, sentences and passages that recall tasks are made of: plain English from small lists, so that a text is the
same on every machine. No word of WORDS occurs in the sentences or passages."""

from collections.abc import Iterator
from random import Random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _split(
    """amber anchor apple arrow badge bamboo bell blanket bottle brick bridge button candle carpet castle chain cherry
    clock cloud coffee copper coral cotton crown crystal desert diamond dragon drum eagle engine feather forest garlic
    ghost glacier glass gold guitar hammer helmet honey iron island ivory jacket jungle ladder leather lemon lion magnet
    maple marble medal mirror monkey needle ocean olive onion orange paint palace paper pearl pepper piano pillow planet
    pocket potato pumpkin pyramid rabbit radio ribbon ring robot rocket rope rose salmon salt shadow shark shell shield
    silk silver snake spider sponge statue sugar sword temple tiger tomato torch tower tractor trumpet tunnel turtle
    umbrella valley violin volcano wagon whale wheat window wolf zebra"""
)
"""What is hidden and asked for: nouns that most vocabularies hold as one token."""

WHEN = (
    *("In the morning", "Later that week", "Before the holidays", "After the meeting", "On most days", "Last summer"),
    *("Early in the year", "Towards the evening", "Every other month", "Once in a while", "The day before", "By then"),
)
WHO = (
    *("the teacher", "a neighbour", "the young driver", "our cousin", "the old farmer", "a visitor from the north"),
    *("the shop owner", "my aunt", "the postman", "a student", "the doctor", "somebody from the office", "the baker"),
    *("the night guard", "a retired sailor", "the new tenant"),
)
DID = (
    *("walked slowly past", "talked for an hour about", "wrote a long letter about", "looked carefully at"),
    *("asked several questions about", "forgot all about", "took a photograph of", "complained about", "read about"),
    *("made a joke about", "did not care much for", "came back to"),
)
WHAT = (
    *("the new road", "the weather", "the quiet village", "the broken fence", "a plan for the garden", "the town hall"),
    *("the long report", "the bus timetable", "the empty house", "the price of bread", "the football match"),
    *("an old song", "the school play", "the river", "the local election", "the road works"),
)
HOW = (
    *("and then went home", "because nobody else would", "without saying much", "while the others waited outside"),
    *("as people often do", "although it was getting late", "and nothing came of it", "just to be sure"),
    *("and felt better afterwards", "for no particular reason", "until it began to rain", "and laughed"),
)

FIRST = _split(
    """Ada Boris Clara Dmitri Elena Farid Greta Hugo Ines Jonas Karim Lena Marta Nils Olga Pablo Rosa Stefan Tara Ulrich
    Vera Walter Yusuf Zoe Anton Berta Carlos Diana Emil Frieda"""
)
LAST = _split(
    """Abbott Barlow Conti Duarte Eriksen Fontaine Garrido Hansen Ivanov Jensen Kowalski Larsen Moreau Novak Okafor
    Petrov Quinn Rossi Schmidt Tanaka Ueda Vargas Weber Yilmaz Zhang Almeida Bianchi Costa Dumont Engel"""
)
TOWNS = _split("Lisbon Bergen Krakow Porto Ghent Turin Cork Lyon Malmo Graz Riga Split Basel Seville Tartu Leeds")


def sentences(draw: Random) -> Iterator[str]:
    """Without end; about 17 words each, from 440,000 different ones."""
    while True:
        when, who, did, what, how = (draw.choice(part) for part in (WHEN, WHO, DID, WHAT, HOW))
        yield f"{when} {who} {did} {what} {how}."


def names(draw: Random) -> list[str]:
    """900 different people."""
    found = [f"{first} {last}" for first in FIRST for last in LAST]
    draw.shuffle(found)
    return found


def passage(draw: Random, name: str, topic: str) -> str:
    """About a person, some 45 words; the topic is that of a book by this person."""
    town, age, more = draw.choice(TOWNS), draw.randint(5, 40), next(sentences(draw))
    when, did, what, how = (draw.choice(part) for part in (WHEN, DID, WHAT, HOW))
    return (
        f"{name} was born in {town} and moved away at the age of {age}. {more} {name} became known for a book about "
        f"the {topic}. {when} {name.split()[0]} {did} {what} {how}."
    )
