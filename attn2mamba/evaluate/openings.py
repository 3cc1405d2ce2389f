"""Openings of texts of many kinds, ours, for models to continue."""

from hashlib import sha256
from itertools import islice

from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from ..sources import load_texts
from .reading import first_ids, token_ids

OPENING_TOKENS = 24
CHARACTERS = 10 * OPENING_TOKENS
"""Of a user's text that is long enough to be an opening."""
OPENINGS = (
    "The ferry had been late every morning that week, and by Thursday nobody on the pier bothered to look at the "
    "clock any more. Marta pulled her collar up and",
    "To make a good vegetable soup, start by cutting two onions, three carrots and a stick of celery into small "
    "cubes. Warm some oil in a heavy pot, then",
    "Volcanoes form where melted rock finds a way through the crust of the Earth. Some of them lie along the edges "
    "of plates, where one plate sinks below another, while",
    "Dear Mr. Aldous, thank you for your letter of the fourth of March. I am sorry to hear that the parcel reached "
    "you in such a state, and I would like",
    '"You said you would be here at noon," she said without turning round. "I said about noon," he answered, and put '
    "the wet umbrella in the corner. They both knew that",
    "def moving_average(values, width):\n    # The mean of every run of `width` neighbouring values, left to right.\n"
    "    if width < 1 or width > len(values):\n        raise ValueError('width must be 1 to the number of values')\n",
    "The town council voted on Tuesday to close the old bridge to cars until the autumn. Engineers found cracks in "
    "two of its five arches, and the repair is expected to",
    "There are three common ways to measure how warm a room is. The first is to ask the people in it; the second is "
    "to hang a thermometer on a wall; the third",
    "Once, in a village at the foot of a hill, there lived a clockmaker who could not tell the time. Every clock in "
    "his shop showed a different hour, and when people",
    "When you plan a long walk in the mountains, look at the weather first, then at the map. A path that looks short "
    "on paper may climb a thousand metres, so it is",
    "The history of printing in Europe is often told as the story of one man, but many workshops were trying to solve "
    "the same problem at that time. Paper had become cheap, and",
    "Question: How do birds find their way when they fly from one continent to another in the dark of night, over sea "
    "and without any landmarks at all?\nAnswer: Birds use",
    "Minutes of the meeting of 12 May. Present: Okoro, Lind, Perez, Tanaka. Item one: the budget for next year. Lind "
    "reported that spending on equipment had risen, mainly because",
    "A prime number is a whole number above one that can be divided without remainder only by one and by itself. To "
    "see that there are infinitely many of them, suppose that",
    "I bought this lamp two months ago for my desk, and I have used it nearly every evening since then. What I like "
    "most is that the light is warm; what I do not like",
    "The snow came down on field and wall,\nit hid the road, it hid the stair,\nand in the house beyond the hill\nan "
    "old man set an empty chair.\nHe",
    "Chapter 7. Networks and how they fail. In the last chapter we saw how a message travels from one computer to the "
    "next. In this chapter we ask what happens when",
    "Here are some ideas for a birthday party with ten children in a small garden, most of them cheap and easy to "
    "prepare: 1. A treasure hunt with paper clues. 2.",
    "The court found that the seller had known about the damp in the cellar before the contract was signed, and that "
    "he had not told the buyer of it. It therefore held that",
    "The patient, a woman of 54 years, came to the clinic with a cough that had lasted for six weeks. She had never "
    "smoked, had no fever, and reported that",
)


def read_openings(data: tuple[str, ...], limit: int | None) -> list[str]:
    """Texts whose beginnings are to be continued: ours, or the first ones of the user's DATA, as many as ours where no
    limit says otherwise. Raises UserError for DATA that cannot be read or is too short."""
    if not data:
        return list(OPENINGS[:limit])
    long_enough = (text for source in data for text in load_texts(source) if len(text) >= CHARACTERS)
    texts = [text[: 4 * CHARACTERS] for text in islice(long_enough, limit or len(OPENINGS))]
    if not texts:
        raise UserError(f"DATA {', '.join(data)} has no text of {CHARACTERS} characters to continue; give longer ones")
    return texts


def opening_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The first OPENING_TOKENS tokens, so that all openings have the same length and run together without padding;
    before them the BOS, where the tokenizer puts one. Raises UserError for a text that is shorter."""
    ids = token_ids(tokenizer, text)[:OPENING_TOKENS]
    if len(ids) < OPENING_TOKENS:
        raise UserError(f"a text to continue needs {OPENING_TOKENS} tokens, {text[:30]!r} has {len(ids)}; leave it out")
    return [*first_ids(tokenizer), *ids]


def digest(texts: list[str]) -> str:
    """Short name of these very texts, for a measure's options."""
    return sha256("\0".join(texts).encode()).hexdigest()[:16]
