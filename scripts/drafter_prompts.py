"""Varied user prompts for a drafter's training data: forms x subjects x passages that the target wrote.

Prompts that a small model writes from nothing are unlike what users ask. These are chat, code, how-to, lists, letters
and, over the target's own sentences, summaries, translations and rewrites. None shares `OVERLAP_WORDS` words in a row
with a held-out prompt (`scripts/heldout.py`), nor any of its subjects.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable

from scripts.heldout import heldout_prompts

OVERLAP_WORDS = 8

_DEVICES = (
    "a microwave oven|a bicycle pump|a steam engine|a compass|a digital camera|a washing machine|a solar panel|a battery|"
    "a telescope|an elevator|a heat pump|a violin|a piano|a thermostat|a wind turbine|a submarine|a GPS receiver|"
    "a laser printer|a hard drive|a touch screen|a helicopter|a dishwasher|a sewing machine|a fire extinguisher|a radio|"
    "an electric motor|a water filter|a barcode scanner|a smoke detector|a parachute|a toaster|a microscope|a sailboat|"
    "a zipper|a clock|a nuclear reactor|a 3D printer|a hearing aid|a vacuum cleaner|a car engine"
).split("|")
_CONCEPTS = (
    "gravity|democracy|evolution|compound interest|machine learning|the water cycle|plate tectonics|electricity|DNA|"
    "supply and demand|the greenhouse effect|quantum mechanics|the immune system|osmosis|magnetism|recursion|irony|"
    "an ecosystem|the stock market|a metaphor|entropy|a mortgage|the internet|a constitution|natural selection|"
    "the Pythagorean theorem|a neural network|probability|globalization|a solar eclipse|the periodic table|biodiversity|"
    "cloud computing|a database index|insurance|stoicism|cryptography|a volcano|a glacier|antibiotics|a galaxy|"
    "the nervous system|a symphony|haiku|game theory|unemployment|opportunity cost|the Renaissance|feudalism|a comet|"
    "the ozone layer|acid rain|a hurricane|a tide|a virus|an enzyme|a hormone|a tax deduction|copyright|a startup|"
    "open source software|an algorithm|object-oriented programming|version control|a prime number|a derivative|"
    "an integral|a matrix|standard deviation|a hypothesis|the scientific method|sound|light|friction|inertia|"
    "nuclear fusion|a transistor|carbon dating|a food chain|mindfulness|empathy|cognitive bias|minimalism|jazz|opera"
).split("|")
_ACTIVITIES = (
    "bake a chocolate cake|paint a room|change a tyre|plant tomatoes|train a puppy|save money|learn to swim|tie a tie|"
    "make good coffee|write a poem|prepare for an exam|start a small business|clean a carpet|build a birdhouse|"
    "cook rice|plan a birthday party|take better photographs|write a resume|play the guitar|knit a scarf|meditate|"
    "fix a leaking tap|choose a laptop|reduce stress|stay focused at work|remove a wine stain|grow herbs indoors|"
    "make a website|give a speech|lose weight|make new friends|organize a closet|read more books|bake bread without an oven|"
    "repair a bicycle|protect my privacy online|pack for a camping trip|write a cover letter|invest in stocks|draw a face|"
    "stop procrastinating|manage my time|deal with a difficult coworker|move to another city|learn to cook|brew beer|"
    "care for a goldfish|make soap|set up a home office|improve my handwriting|teach a child to read|iron a shirt|"
    "make pasta from scratch|back up my computer|negotiate a salary|raise chickens|write a novel|climb a mountain safely|"
    "recycle at home|save electricity|sharpen a knife|keep a diary|wash a wool sweater|get rid of ants|plan a garden"
).split("|")
_SUBJECTS = (
    "coffee|the Roman Empire|whales|the Moon|bicycles|ancient Egypt|volcanoes|the piano|dogs|elephants|tea|Japan|"
    "the Amazon rainforest|trains|cheese|penguins|the Olympic Games|Mars|owls|chocolate|the printing press|Paris|"
    "the Vikings|robots|dolphins|music|India|desert animals|the human brain|football|the Great Wall of China|butterflies|"
    "poetry|cinema|potatoes|mountains|New York|space travel|oceans|horses|mathematics|wolves|Brazil|painting|spiders|"
    "the French Revolution|electric cars|sleepwalking|dreams|friendship|healthy food|exercise|social media|video games|"
    "school uniforms|remote work|public transport|renewable energy|recycling|libraries|gardening|winter|autumn|rain|"
    "the first computers|Albert Einstein|Marie Curie|Leonardo da Vinci|William Shakespeare|Cleopatra|Mozart|Isaac Newton|"
    "Charles Darwin|Africa|Australia|Canada|the Industrial Revolution|World War II|the Silk Road|coral reefs|forests|"
    "insects|bridges|skyscrapers|castles|museums|fashion|dance|theatre|photography|cooking|Italian food|spices|wine|fruit"
).split("|")
_PEOPLE = (
    "a teacher|a nurse|a sailor|a baker|a detective|an astronaut|a farmer|a musician|a librarian|a dragon|a robot|"
    "a lost dog|a young inventor|a fisherman|two sisters|an old clockmaker|a taxi driver|a gardener|a knight|a ghost|"
    "a scientist|a painter|a shy boy|a talking tree|a shopkeeper|a firefighter|a pilot|a grandmother|a spy|a king"
).split("|")
_WHYS = (
    "is the sky blue|do dogs bark|do we dream|does ice float|do birds migrate|is exercise important|do people yawn|"
    "do stars twinkle|does metal rust|are flamingos pink|do we have time zones|does the Moon have phases|do onions make us cry|"
    "is reading good for children|do cats sleep so much|do volcanoes erupt|did the Roman Empire fall|are bees important|"
    "is water essential for life|do we need laws|do prices rise|do some people like spicy food|do zebras have stripes|"
    "does bread go stale|do we laugh|is teamwork important|do computers use binary|is sugar bad for teeth|do magnets attract iron|"
    "do we get goosebumps|is honesty important|do snakes shed their skin|does the wind blow|is biodiversity important"
).split("|")
_PLACES = (
    "Paris|Rome|Tokyo|the Alps|Egypt|New York|Kenya|Scotland|Thailand|Peru|Portugal|Norway|Morocco|Canada|Greece|Istanbul"
).split("|")
_CHAT = (
    ("How does {} work?", _DEVICES), ("Explain how {} works to a child.", _DEVICES), ("Who invented {} and when?", _DEVICES),
    ("What are the parts of {}?", _DEVICES), ("What should I look for when I buy {}?", _DEVICES),
    ("What is {}?", _CONCEPTS), ("Explain {} in simple terms.", _CONCEPTS), ("Can you give me an example of {}?", _CONCEPTS),
    ("Why does {} matter?", _CONCEPTS), ("Explain {} to a ten-year-old.", _CONCEPTS), ("Define {}.", _CONCEPTS),
    ("How do I {}?", _ACTIVITIES), ("Can you help me {}?", _ACTIVITIES), ("What do I need to {}?", _ACTIVITIES),
    ("Give me five tips to {}.", _ACTIVITIES), ("I want to {}. Where do I start?", _ACTIVITIES),
    ("Write step-by-step instructions: how to {}.", _ACTIVITIES), ("What mistakes do people make when they {}?", _ACTIVITIES),
    ("Is it hard to {}?", _ACTIVITIES), ("How long does it take to {}?", _ACTIVITIES),
    ("Tell me something interesting about {}.", _SUBJECTS), ("Write a paragraph about {}.", _SUBJECTS),
    ("What are the most important facts about {}?", _SUBJECTS), ("Describe {}.", _SUBJECTS),
    ("Give me a list of ten words about {}.", _SUBJECTS), ("Write a poem about {}.", _SUBJECTS),
    ("What do people like about {}?", _SUBJECTS), ("Give me three quiz questions about {}.", _SUBJECTS),
    ("Write an introduction to an essay on {}.", _SUBJECTS), ("What are the advantages and disadvantages of {}?", _SUBJECTS),
    ("Suggest a title for a book about {}.", _SUBJECTS), ("Explain the history of {} briefly.", _SUBJECTS),
    ("Write a blog post about {}.", _SUBJECTS), ("How has {} changed over time?", _SUBJECTS),
    ("Write a short story about {}.", _PEOPLE), ("Describe the life of {}.", _PEOPLE),
    ("Write a dialogue between {} and a stranger.", _PEOPLE), ("Begin a tale in which {} finds a map.", _PEOPLE),
    ("Write an e-mail to {} to ask for advice.", _PEOPLE), ("What skills does {} need?", _PEOPLE),
    ("Why {}?", _WHYS), ("Explain why {}.", _WHYS), ("My son asks: why {}? What do I tell him?", _WHYS),
    ("What should I see in {}?", _PLACES), ("Plan three days in {}.", _PLACES), ("What is the weather like in {}?", _PLACES),
    ("What food is typical of {}?", _PLACES), ("What is the best time of year to visit {}?", _PLACES),
)  # fmt: skip
_TAILS = ("", "", "", "", "", " Be brief.", " Answer in one paragraph.", " Answer in two sentences.", " Use simple words.",
          " Give examples.", " Please explain in detail.", " Answer as a list.")  # fmt: skip
_CODE_VERBS = (
    ("finds {} of {}", ("the maximum", "the minimum", "the sum", "the average", "the median", "the second largest element", "the index of the smallest element", "the product", "the number of distinct elements"), ("a list of numbers", "an array", "a list of lists", "the values of a dictionary", "a tuple", "the numbers in a file", "a column of a table")),
    ("{} {}", ("sorts", "filters", "shuffles", "prints", "copies", "searches in", "validates", "saves to a file", "loads from a file", "compares two of"), ("a list of names", "a list of dates", "an array of objects", "a binary tree", "a set of words", "a queue", "a list of students and grades", "a table of products", "a text with line numbers", "a graph")),
    ("{} in {}", ("counts the vowels", "replaces the spaces", "finds the longest word", "capitalizes each word", "counts each character", "finds all numbers", "swaps the first and last letter", "removes the punctuation", "finds a substring", "checks for duplicates"), ("a string", "a sentence", "a list of strings", "a file", "user input")),
    ("converts {} to {}", ("Celsius", "a string", "a list", "a date", "a binary number", "a JSON object", "miles", "a hexadecimal colour", "a timestamp", "a dictionary"), ("Fahrenheit", "an integer", "a string", "a list of tuples", "a decimal number", "kilometres", "lower case", "an array", "a table", "a set")),
    ("calculates {} for {}", ("the area", "the factorial", "the square root", "the compound interest", "the tax", "the distance", "the body mass index", "the power", "the discount", "the total price"), ("a circle", "a given number", "a rectangle", "two points", "a customer", "a list of items", "any input", "a shopping cart")),
)  # fmt: skip
_CODE_FORMS = (
    "Write a Python function that {}.", "Write a Python program that {}.", "Write code that {}.", "Write a {lang} function that {}.",
    "How do I write a {lang} program that {}?", "Show an example in {lang}: a function that {}.", "Create a class in {lang} that {}.",
    "Give me a simple {lang} script that {}. Explain each step.", "I need a function that {}. Use {lang} and add comments.",
)  # fmt: skip
_CODE_LANGUAGES = ("Python", "Python", "JavaScript", "JavaScript", "Java", "C++", "C", "Go", "Rust", "TypeScript", "Ruby")
_SUMMARY_FORMS = (
    "Summarize this: {}", "Summarize the following text in one sentence: {}", "What is the main idea of this text? {}",
    "Suggest a title for the following paragraph: {}", "{} What is this text about?", "Write a headline for this: {}",
    "Shorten this text: {}", "Give me a one-line summary. {}", "Summarize the text below.\n\n{}", "TL;DR: {}",
    "Give the text a short title. {}", "Say in one sentence what this says: {}",
)  # fmt: skip
_SENTENCE_FORMS = (
    "Translate the following sentence into {lang}: {}", "Translate to {lang}: {}", "How do you say this in {lang}? {}",
    "Translate into {lang}: {}", "Please give me the {lang} translation of: {}", "What is \"{}\" in {lang}?",
    "Rewrite this sentence: {}", "Correct the grammar: {}", "Make this sentence more polite: {}", "Continue this text: {}",
)  # fmt: skip
_LANGUAGES = ("French", "French", "Spanish", "Spanish", "German", "German", "Italian", "Italian", "Portuguese", "Dutch")


def words_of(text: str) -> list[str]:
    """The words of a text, lower case."""
    return re.findall(r"[\w'-]+", text.lower())


def overlaps(text: str, seen: set[tuple[str, ...]]) -> bool:
    """Whether some `OVERLAP_WORDS` words in a row of the text are in `seen` (a shorter text: all its words)."""
    return not seen.isdisjoint(_runs(text))


def heldout_runs() -> set[tuple[str, ...]]:
    """All runs of words of the held-out prompts that no training prompt may have."""
    return {run for _, prompt in heldout_prompts() for run in _runs(prompt)}


def _runs(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[i : i + OVERLAP_WORDS]) for i in range(max(1, len(words) - OVERLAP_WORDS + 1))}


class Prompts:
    """A stream of prompts, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._forbidden = heldout_runs()

    def direct(self, count: int) -> list[str]:
        """Chat and code prompts, two to one."""
        return [self._allowed(self._code if self._random.random() < 1 / 3 else self._chat) for _ in range(count)]

    def over(self, texts: Iterable[str], count: int) -> list[str]:
        """Prompts about passages and sentences of these texts, half of each; fewer when the texts do not suffice."""
        passages, sentences = [], []
        for text in texts:
            parts = [s for s in re.findall(r"[A-Z][^.!?\n*`{}]*[.!?](?=\s|$)", text) if 4 <= len(s.split()) <= 30]
            if len(parts) >= 2:
                size = self._random.choice((2, 2, 3))
                start = self._random.randrange(max(1, len(parts) - size + 1))
                passages.append(" ".join(parts[start : start + size]))
            sentences += [s for s in parts if len(s.split()) <= 14]
        made = []
        for kind, forms in ((passages, _SUMMARY_FORMS), (sentences, _SENTENCE_FORMS)):
            for passage in self._random.sample(kind, min(count // 2, len(kind))):
                form = self._random.choice(forms)
                text = form.format(passage, lang=self._random.choice(_LANGUAGES))
                if not overlaps(text, self._forbidden):
                    made.append(text)
        return made

    def _allowed(self, make: Callable[[], str]) -> str:
        while overlaps(text := make(), self._forbidden):
            pass
        return text

    def _chat(self) -> str:
        form, subjects = self._random.choice(_CHAT)
        return form.format(self._random.choice(subjects)) + self._random.choice(_TAILS)

    def _code(self) -> str:
        form, firsts, seconds = self._random.choice(_CODE_VERBS)
        task = form.format(self._random.choice(firsts), self._random.choice(seconds))
        return self._random.choice(_CODE_FORMS).format(task, lang=self._random.choice(_CODE_LANGUAGES))
