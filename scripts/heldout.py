"""Held-out prompts: chat, code, summary, translation, 56 of each. Written by hand, never part of a drafter's training.

(Training prompts are written by the target itself, see `scripts/drafter_data.py`.)
"""

from __future__ import annotations

from itertools import product

_CHAT = (
    "Why do cats purr?", "How does a refrigerator work?", "What should I pack for a week in Iceland?",
    "How can I sleep better?", "What is the difference between weather and climate?",
    "Tell me about the history of chess.", "Why is bread baked with yeast?", "How do I start running?",
    "What makes a good leader?", "How do airplanes stay in the air?", "What are the rings of Saturn made of?",
    "Give me tips for a job interview.", "How do I keep houseplants alive?", "What is inflation?",
    "Why do leaves change colour in autumn?", "How is glass made?", "What can I cook with lentils and rice?",
    "How do vaccines work?", "Describe a typical day of a lighthouse keeper.", "What is a black hole?",
    "How do I learn a new language quickly?", "Why is the sea salty?", "What is the purpose of a budget?",
    "How do bees make honey?", "Suggest a weekend trip for a family with small children.",
    "What causes earthquakes?", "How do I write a thank-you letter?", "What is photosynthesis?",
)  # fmt: skip
_CHAT_FORMS = ("{}", "{} Answer in three short paragraphs.")
_CODE = (
    "reverses a linked list", "checks whether a string is a palindrome", "merges two sorted lists",
    "counts the words of a text file", "computes the n-th Fibonacci number", "finds the longest common prefix",
    "parses a CSV line", "validates an e-mail address", "rotates a matrix by ninety degrees",
    "implements binary search", "removes duplicates from a list and keeps the order", "converts Roman numerals",
    "flattens a nested list", "computes the greatest common divisor", "groups words by their first letter",
    "downloads a file with a progress bar", "sorts a dictionary by its values", "draws a triangle of stars",
    "computes a moving average", "finds all prime numbers below n", "encodes a string with run lengths",
    "balances brackets in an expression", "transposes a table", "measures how long a function takes",
    "reads a JSON file and prints its keys", "implements a stack with a minimum", "splits a list into chunks",
    "converts seconds to hours, minutes and seconds",
)  # fmt: skip
_CODE_FORMS = ("Write a Python function that {}.", "Show me a JavaScript function that {} and explain it briefly.")
_FACTS = (
    "The harbour of the old town was deepened in 1887, and within ten years the number of ships had doubled.",
    "A new library opened on Monday; it holds forty thousand books and a workshop for repairing instruments.",
    "Researchers tracked the migration of storks with small transmitters and found that young birds fly farther.",
    "The village decided to heat its school with wood chips from the forest, which halves the cost of fuel.",
    "After three dry summers the river carried so little water that the ferry had to stop for six weeks.",
    "The museum's oldest clock was taken apart, cleaned and put together again by a team of four watchmakers.",
    "A baker from the north won the national prize with a dark rye bread that rests for two days.",
    "The railway company will run night trains between the two capitals again, with cabins for bicycles.",
)
_SUMMARY_FORMS = ("Summarize in one sentence: {}", "Give a short title to this text: {}")
_SENTENCES = (
    "The train leaves at half past seven from platform two.", "I would like a table by the window, please.",
    "She has worked in this hospital for eleven years.", "Could you tell me where the post office is?",
    "The children are playing in the garden behind the house.", "We missed the bus because it was raining.",
    "This book is more interesting than the film.", "My brother will visit us next weekend.",
    "The water in the lake is cold but very clear.", "They have not decided yet what to do tomorrow.",
    "Please close the door when you leave.", "He bought bread, cheese and three apples at the market.",
    "The museum is closed on Mondays.", "If it snows tonight, we will stay at home.",
)  # fmt: skip
_LANGUAGES = ("French", "Spanish", "German", "Italian")


def heldout_prompts() -> list[tuple[str, str]]:
    """(kind, prompt), 56 of each kind."""
    pairs = [(a, b) for a, b in product(_FACTS, repeat=2) if a != b]
    summaries = [f"{a} {b}" for a, b in pairs][::2]
    return [
        *(("chat", form.format(question)) for question, form in product(_CHAT, _CHAT_FORMS)),
        *(("code", form.format(task)) for task, form in product(_CODE, _CODE_FORMS)),
        *(("summary", form.format(text)) for text, form in product(summaries, _SUMMARY_FORMS)),
        *(
            ("translation", f"Translate into {language}: {sentence}")
            for sentence, language in product(_SENTENCES, _LANGUAGES)
        ),
    ]
