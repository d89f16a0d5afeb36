"""Plain English without a source: sentences drawn from a small grammar of common words.

They keep real text from being pure noise to the embedded checkpoint, and give its tokenizer
whole words of everyday English; they teach no facts.
"""

from __future__ import annotations

import re

from numpy.random import Generator

SENTENCES = (
    "The {adjective} {person} {did} the {thing} {when}.",
    "The {group} said on {day} that the {thing} {changed} {when}.",
    "What is the {property} of the {thing}?",
    "The {property} of the {thing} is {adjective} because the {person} {did} it.",
    "If you want to {act} the {thing}, you should first {act} the {adjective} {thing}.",
    "{name} {did} the {thing} with {name} and then went to {place}.",
    "Can you give me a list of {number} {things} that a {person} would {act}?",
    "There are {number} {adjective} {things} in {place}.",
    "The {group} will {act} its new {thing} in {place} {when}, after {number} years of work.",
    "A {person} is {doing} near the {thing} while the other people are {doing}.",
    "How does a {thing} work, and why do people {act} it?",
    "It was the most {adjective} {thing} that {name} had ever seen, but not the only one.",
    "In {place}, a {group} and a {group} have been {doing} for the {property} of {things}.",
    "{name} did not {act} the {thing}, which was {adjective}, so the {group} {did} it {when}.",
)
"""Sentence patterns; a `{slot}` stands for any phrase of that slot."""

SLOTS = {
    slot: tuple(phrases.split(", "))
    for slot, phrases in {
        "adjective": "good, new, first, last, long, great, little, own, old, right, big, high, small, large, next, "
        "young, important, public, bad, same, able, common, different, simple, hot, cold, strong, free, real, clear, "
        "recent, possible, human, local, late, hard, short, best, final",
        "person": "man, woman, child, student, teacher, player, doctor, worker, friend, writer, leader, user, girl, "
        "boy, expert, driver",
        "group": "government, company, team, market, police, party, school, court, bank, group, army, press, union, "
        "club, state, city",
        "thing": "house, car, game, book, story, question, answer, water, money, system, program, computer, product, "
        "service, price, oil, stock, phone, network, world, country, war, election, law, report, idea, word, "
        "sentence, example, street, door, table, head, night, life, problem, music, movie, internet, plan, deal, "
        "record, site, search, space, text, input, context",
        "things": "things, words, games, books, stories, questions, cars, prices, shares, phones, computers, animals, "
        "colors, numbers, reports, rules, friends, countries, companies, students",
        "property": "size, color, price, name, cause, result, number, level, cost, history, meaning, end, use, value, "
        "power, side, part",
        "did": "made, took, found, used, called, bought, sold, won, lost, built, read, wrote, helped, opened, closed, "
        "showed, kept, left",
        "doing": "playing, walking, talking, running, standing, sitting, working, looking, eating, holding, making",
        "act": "make, use, find, give, tell, ask, need, feel, try, leave, call, keep, help, show, play, move, write, "
        "read, buy, sell, build",
        "changed": "rose, fell, grew, was sold, was closed, will end, could rise, had changed, may return",
        "when": "today, yesterday, this week, last year, on Monday, in the third quarter, at the same time, every day",
        "day": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
        "name": "John, Mary, David, Anna, James, Sarah, He, She, They, Someone",
        "place": "London, China, Iraq, Europe, America, Paris, Japan, India, Russia, Germany, New York",
        "number": "two, three, four, five, six, ten, 10, 20, 100, 2004, many, several, some",
    }.items()
}

_SLOT = re.compile(r"\{(\w+)\}")


def paragraph(rng: Generator, sentences: int) -> str:
    """Returns a paragraph of this many unrelated sentences."""
    return " ".join(_sentence(rng) for _ in range(sentences))


def _sentence(rng: Generator) -> str:
    pattern = SENTENCES[rng.integers(len(SENTENCES))]

    def phrase(slot: re.Match[str]) -> str:
        choices = SLOTS[slot[1]]
        return choices[rng.integers(len(choices))]

    return _SLOT.sub(phrase, pattern)
