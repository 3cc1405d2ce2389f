"""What the words of a report mean, a line for each that occurs in it."""

import re
from dataclasses import dataclass

from .numbers import Json

AFTER_STAGE_1 = "the model after stage 1 (linear attention)"

HIGHER, LOWER = "Higher", "Lower"


@dataclass(frozen=True)
class Entry:
    """names: regular expressions, one of which a measure or a metric (without `@LENGTH`, a filter and the way of
    decoding) has to match as a whole; words: one that has to be found in what the page says. better: Higher, Lower or
    empty."""

    term: str
    meaning: str
    better: str = ""
    names: tuple[str, ...] = ()
    words: str = ""


ENTRIES = (
    Entry("hedgehog", f"{AFTER_STAGE_1[0].upper()}{AFTER_STAGE_1[1:]}; the student comes from it in stage 2.",
          words=r"\bhedgehog\b"),
    Entry("perplexity", "e to the mean loss in nats a token: among about how many equally likely tokens the model "
          "hesitates.", LOWER, words=r"(?i)\bperplexit"),
    Entry("word_perplexity", "The same by word of the text, which does not depend on the tokenizer.", LOWER,
          ("word_perplexity",)),
    Entry("nats_per_token, bits_per_byte", "The same loss before the exponential: a token in nats (base e), and a byte "
          "of text in bits (base 2), which does not depend on the tokenizer.", LOWER,
          ("nats_per_token", "bits_per_byte", "nats?", "nll")),
    Entry("log_likelihood", "Logarithm of the probability that the model gives to the right answer, in nats.", HIGHER,
          ("log_likelihood",)),
    Entry("acc, acc_norm", "Share of questions whose right choice is the likeliest; acc_norm: the likeliest per "
          "character, so that long choices do not lose by their length.", HIGHER, ("acc", "acc_norm")),
    Entry("accuracy", "Share of answers that are right.", HIGHER, ("accuracy",)),
    Entry("exact_match, flexible_match", "Share of written answers that are the right one; flexible: by the last "
          "number, wherever it stands.", HIGHER, ("exact_match", "flexible_match")),
    Entry("lambada", "Passages of which the model has to tell the last word.", names=("lambada.*",)),
    Entry("greedy (recall)", "Share of right answers in what the model writes, always taking the likeliest token.",
          HIGHER, ("recall greedy",)),
    Entry("likelihood (recall)", "Share of right answers that are likelier than wrong candidates, which takes no "
          "obedience to an instruction.", HIGHER, ("recall likelihood",)),
    Entry("copying", "A string of random words comes again, distance tokens after the first time; the model has to "
          "go on with it. size: words in the string.", names=("copying",)),
    Entry("associative", "The value of a key, from lines of random words, distance tokens before. size: pairs of key "
          "and value.", names=("associative",)),
    Entry("needle", "One word, hidden by its key at some depth of a long prose text.", names=("needle",)),
    Entry("multikey", "Eight such words in one text, each asked for by its own key.", names=("multikey",)),
    Entry("multivalue", "Four such words that belong to one key.", names=("multivalue",)),
    Entry("tracking", "All variables of a chain of assignments, among other chains.", names=("tracking",)),
    Entry("commonwords", "The most frequent words of a long list.", names=("commonwords",)),
    Entry("distractors", "What one person wrote about, among passages about others.", names=("distractors",)),
    Entry("positions", "Long texts read from their beginning: what the model pays for what it forgets.",
          names=("positions",)),
    Entry("depth", "Where in the context something is hidden: 0 is its start, 1 its end.", words=r"\bDepth 0\b"),
    Entry("guessing, chance", "The score of a model that only guesses.", words=r"(?i)\bguess"),
    Entry("over guessing", "The score less what guessing gets, so that a model that has learned nothing stands at 0.",
          words=r"(?i)\bover (those of )?guessing\b"),
    Entry("beyond training length", "At a context longer than the model says that it was trained for.",
          words=r"\bbeyond (the|training) length\b"),
    Entry("greedy_, sampled_", "Texts written by always taking the likeliest token, or by drawing tokens at random "
          "(temperature 0.8, top-p 0.95).", names=("(greedy|sampled)_.*",)),
    Entry("loop", "Share of texts that end in the same tokens over and over.", LOWER, ("loop",)),
    Entry("repeated_4grams", "Share of runs of four tokens that occurred in the same text before.", LOWER,
          ("repeated_4grams",)),
    Entry("distinct_n", "Share of runs of n tokens that differ from one another. Long texts have less of them.", HIGHER,
          (r"distinct_\d",)),
    Entry("tokens (metric)", "How long the texts are; shorter ones repeat less.", names=("tokens",)),
    Entry("token_agreement", "Share of the teacher's tokens that are the model's likeliest too, given the teacher's "
          "text so far.", HIGHER, ("token_agreement",)),
    Entry("kl", "KL divergence of the model's next token from the teacher's, in nats a token; 0 where the two predict "
          "alike.", LOWER, ("kl",)),
    Entry("common_prefix", "Tokens until the model's own text first differs from the teacher's.", HIGHER,
          ("common_prefix",)),
    Entry("same_text", "Share of texts that equal the teacher's to the last token.", HIGHER, ("same_text",)),
    Entry("parses", "Share of answers that are JSON.", HIGHER, ("parses",)),
    Entry("valid", "Share of answers that are JSON of the form asked for.", HIGHER, ("valid",)),
    Entry("name, arguments", "Share of calls that name the right function, or give it the right arguments.", HIGHER,
          ("name", "arguments")),
    Entry("right", "Share of answers with the right values.", HIGHER, ("right",)),
    Entry("recalled", "The same in the turns that ask for what was said before.", HIGHER, ("recalled",)),
    Entry("all_valid", "Share of conversations in which every answer is valid.", HIGHER, ("all_valid",)),
)  # fmt: skip


def glossary(document: Json, words: str) -> list[Entry]:
    """The entries that a report has use for: its metrics and measures, and `words`, what its page says."""
    names = {name for run in document["runs"] for row in run["measures"] if row["headline"] for name in _names(row)}
    said = "\n".join([words, *document["rules"], *(text for run in document["runs"] for text in _said(run))])
    return [
        entry
        for entry in ENTRIES
        if any(re.fullmatch(pattern, name) for pattern in entry.names for name in names)
        or (entry.words and re.search(entry.words, said))
    ]


def _names(row: Json) -> tuple[str, ...]:
    metric = re.split("[@,]", row["metric"])[0]
    if row["kind"] == "recall":
        return row["measure"], f"recall {metric}", metric
    return row["measure"], metric, re.sub("^(greedy|sampled)_", "", metric)


def _said(run: Json) -> list[str]:
    return [run["verdict"], *(number["source"] for number in run["scorecard"].values())]
